"""The operators' live pages inside the Django admin. Reads selectors, acts through services."""
