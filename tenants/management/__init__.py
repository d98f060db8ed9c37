"""Operator's commands about tenants and tokens."""
