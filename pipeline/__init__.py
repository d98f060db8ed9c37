"""The data pipeline: the marts (tables of aggregated history), and their API.

`pipeline.spark` computes the marts. Of the other packages, it imports only `core.failure_fingerprint`.
"""
