"""The engine proved against a model, at every error point; `world.py` is what these tests, concurrency and faults share."""
