"""The operators' console inside the Django admin: pages about queues, dead letters, deliveries and charts."""
