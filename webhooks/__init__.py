"""Webhooks: callbacks about ended tasks, notifications to workers, and their signatures."""
