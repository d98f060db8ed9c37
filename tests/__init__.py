"""The tests, in a package for each package of the project."""
