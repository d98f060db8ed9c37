"""The console: live pages for operators inside the Django admin."""
