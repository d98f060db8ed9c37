"""The views of the queue API, in a module for each noun."""
