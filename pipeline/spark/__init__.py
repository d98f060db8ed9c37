"""The pipeline itself, on Spark: sources, pure transforms, sinks and jobs. No Django here, and of ours only
`core.failure_fingerprint`, so that it runs wherever a Spark driver does: `python -m pipeline.spark --help`."""
