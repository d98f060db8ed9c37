"""Concurrency tests: show a race without its guard, then show that the guard prevents it."""
