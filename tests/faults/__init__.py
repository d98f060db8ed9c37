"""Fault tests: no acknowledged data is lost or duplicated when servers fail, stall, fill up or move."""
