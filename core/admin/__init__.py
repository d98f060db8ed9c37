"""Mixins, form fields and middleware of the admin and the console."""
