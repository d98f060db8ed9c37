"""What a queue does: tasks, leases, results, retries. Who may ask is `tenants`; who is told is `webhooks`."""
