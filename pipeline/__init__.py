"""History to tables: the marts and how they are seen. `pipeline.spark` computes them, and imports of the rest only
`core.failure_fingerprint`."""
