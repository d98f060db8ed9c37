"""The views of the queue API. Each noun has its own module."""
