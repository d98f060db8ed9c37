"""Start the Spark session of the pipeline, locally or on another master.

Results are the same on every master.
"""

from __future__ import annotations

import logging
import os
import sys

import pyspark.cloudpickle as cloudpickle
from pyspark.sql import SparkSession

import pipeline.spark
from pipeline.spark import java

logger = logging.getLogger(__name__)

# Settings for every master, so that results do not depend on it.
COMMON_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    # A broken file must raise an error instead of being skipped.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    # Speculation would run the read of a Python data source twice, which is useless on a snapshot.
    "spark.speculation": "false",
    # With version 1, files appear under their final name only when the whole job has committed.
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "1",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Disable an optimisation that sorts the rows again before the shuffle to keep the first row of each key.
    "spark.sql.optimizer.windowGroupLimitThreshold": "-1",
    # The manifest already names the partitions, so listing thousands of paths needs no Spark job.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "20000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # Keep secrets out of query plans and logs.
    "spark.sql.redaction.options.regex": "(?i)url|dsn|password|token",
}
LOCAL_SETTINGS = {
    # The default of 200 adds scheduling overhead per Spark task without a benefit on a few cores.
    "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 2)),
    "spark.driver.memory": "2g",
    # On few cores, a concurrent garbage collector takes a tenth of the CPU time.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    # Collect the lists of a group's values in a hash table. Above 128 groups, Spark's default, it would sort all rows
    # first. A group and its list take a few kilobytes.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    "spark.ui.enabled": "false",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
}
LOOPBACK_SETTINGS = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def is_local(master: str) -> bool:
    return master.startswith("local")


def is_loopback(master: str) -> bool:
    return is_local(master) or master.startswith(("spark://127.0.0.1:", "spark://localhost:"))


def start(master: str | None = None, *, name: str = "codeq", conf: dict[str, str] | None = None) -> SparkSession:
    """Return this process's session, started if necessary.

    `conf` overrides the settings of this module. The default of `master` is SPARK_MASTER, or this machine if that is
    not set. This module and `java` read the environment themselves, because they must run without Django's settings.
    """
    master = master or os.environ.get("SPARK_MASTER") or "local[*]"
    os.environ["JAVA_HOME"] = str(java.find_home())
    # The Python workers must use this interpreter, not the first `python3` on the PATH.
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    if is_loopback(master):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Pickle the functions that run on executors by value, so that a cluster needs the dependencies but not this code.
    cloudpickle.register_pickle_by_value(pipeline.spark)  # type: ignore[no-untyped-call]
    settings = {
        **COMMON_SETTINGS,
        **(LOCAL_SETTINGS if is_local(master) else {}),
        **(LOOPBACK_SETTINGS if is_loopback(master) else {}),
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    # py4j logs every connection that it opens and closes, even after the logging handlers are closed.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logger.info("Starting Spark on %s", master)
    session = builder.getOrCreate()
    return session
