"""The HTTP API of worker subscriptions."""
