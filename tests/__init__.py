"""The tests, a room for each room of the project; `conftest.py` holds the servers they all run on."""
