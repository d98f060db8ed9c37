"""Queues: tasks, leases, results, dead letters, the audit, and their HTTP API."""
