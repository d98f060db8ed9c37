"""Ranked queues: the order of tasks that are rows of the caller's own database."""
