"""The pipeline on Spark: sources, pure transforms, sinks and Spark jobs.

It imports neither Django nor another package of this project, except for `core.failure_fingerprint`. So it runs on any
Spark driver: `python -m pipeline.spark --help`.
"""
