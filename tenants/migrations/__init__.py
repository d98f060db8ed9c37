"""Migrations of the tables of `tenants`."""
