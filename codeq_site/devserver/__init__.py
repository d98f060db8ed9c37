"""The parts of `manage.py up`: servers, supervisor, data directory and first logins."""
