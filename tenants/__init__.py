"""Who is asking, and how much they may: tenants, tokens, rights. Knows nothing of queues or webhooks."""
