"""The pipeline on Spark: sources, pure transforms, sinks and Spark jobs.

It does not import Django, and of this project only `core.failure_fingerprint`, so that it runs on any Spark driver:
`python -m pipeline.spark --help`.
"""
