"""Run the examples of docs/howto/marts.md exactly as they are documented."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pipeline.spark.lake import Lake
from tests.pipeline.history import Audit, build_attempt, build_dead_attempt

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "marts.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(python|sql)\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.spec("DOC-2", "The examples in the how-to guide on marts run as documented")
def test_documented_examples_return_results(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    with psycopg.connect(audit.dsn) as connection:
        connection.execute(
            "INSERT INTO tenants_tenant (tid, slug, name, status, created_at, updated_at, changed)"
            " VALUES ('acme0001', 'acme', '', 'active', now(), now(), 0)"
        )
    audit.add([build_attempt() for _ in range(30)] + [build_dead_attempt()])
    run()
    executed = []
    for kind, code in EXAMPLES:
        if kind == "sql":
            assert audit.query(code), code
        elif "import duckdb" not in code or importlib.util.find_spec("duckdb"):
            names: dict[str, Any] = {}
            exec(code.replace("var/lake", lake.url), names)
            assert any(len(names[name]) for name in ("worst", "rows", "by_worker") if name in names), code
        executed.append(kind)
    assert executed.count("sql") == 3
    assert executed.count("python") == 3
