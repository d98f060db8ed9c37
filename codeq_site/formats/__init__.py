"""How moments are written, by language, as Django asks for it."""
