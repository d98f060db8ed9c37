"""The API's HTTP layer: server protocol, router, views and OpenAPI document."""
