"""Formats for English, the language of the console."""
