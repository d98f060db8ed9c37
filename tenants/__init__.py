"""Tenants, tokens and permissions."""
