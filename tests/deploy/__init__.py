"""Tests of the files in deploy/ with the programs that read them: helm and nginx. `make test-deploy` runs them."""
