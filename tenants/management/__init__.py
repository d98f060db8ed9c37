"""Commands about tenants, secrets, keys and tokens."""
