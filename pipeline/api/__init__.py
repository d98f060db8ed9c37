"""The marts over HTTP, for the tenant they are about. What a route is, `core.http.api_view` says."""
