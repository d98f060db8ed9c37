"""`manage.py token` and `manage.py secret`: each prints one thing, so that a script can use it."""
