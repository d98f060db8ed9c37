"""Telling the outside: subscriptions, deliveries, signatures. Learns of tasks only through `queues.audit.events`."""
