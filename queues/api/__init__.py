"""The HTTP API of queues: schemas, views and routes.

The transitions are in `queues.services`.
"""
