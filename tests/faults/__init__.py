"""Fault tests: failures of servers neither lose nor duplicate acknowledged data."""
