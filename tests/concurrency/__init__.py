"""Races on purpose: the race is shown without its guard, then the guard."""
