"""The engine proved against a model and at every error point; `world.py` serves concurrency and faults too."""
