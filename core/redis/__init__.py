"""Connections to Redis, one server or a cluster, and calls of its scripts."""
