"""English is what the console speaks."""
