"""Servers killed, cut, filled, moved: nothing acknowledged is lost, nothing is doubled."""
