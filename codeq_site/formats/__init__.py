"""Formats of dates and times by language (`FORMAT_MODULE_PATH`)."""
