"""How the tables of `tenants` came to be."""
