"""Tests of the files in deploy/ with helm and nginx. `make test-deploy` runs them."""
