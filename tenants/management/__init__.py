"""Commands for operators, about tenants and tokens."""
