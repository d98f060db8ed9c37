"""Tests of the engine against a model and at every error point."""
