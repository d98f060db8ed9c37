"""The moments at which tests kill a Spark run, and the process to kill."""

from __future__ import annotations

# Progress message, delay in seconds after it, and the target: only Spark's JVM, or also the driver.
MOMENTS = [
    ("attempts: started", 0.3, "jvm"),
    ("ingest: publishing", 0.0, "all"),
    ("attempts: staged", 0.0, "jvm"),
    ("usage: staged", 0.0, "all"),
    ("ingest: reading", 0.2, "jvm"),
    ("attempts: publishing", 0.0, "all"),
    ("usage: publishing", 0.0, "all"),
    ("ingest: staged", 0.0, "jvm"),
    ("usage: started", 0.1, "all"),
]
