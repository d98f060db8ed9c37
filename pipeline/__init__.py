"""The data pipeline: the marts of a tenant's history, and their API.

`pipeline.spark` computes the marts. Of the other packages, it imports only `core.failure_fingerprint`.
"""
