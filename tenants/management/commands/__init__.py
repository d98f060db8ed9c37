"""`manage.py token`, `secret`, `keys` and `reseal`. Scripts can use their output."""
