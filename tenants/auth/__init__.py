"""Authentication of the API: tokens, their claims, and the keys that verify them."""
