"""The marts over HTTP, for the tenant they are about. What a route is, `queues.api.view` says."""
