"""`manage.py token`, `secret` and `keys`: what they print, a script can use."""
