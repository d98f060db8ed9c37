"""System checks: what `manage.py check --deploy` refuses in production."""
