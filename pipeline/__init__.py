"""The data pipeline: the marts of a tenant's history, and their API.

`pipeline.spark` computes them and imports nothing of the other modules but `core.failure_fingerprint`.
"""
