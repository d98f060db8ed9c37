"""The examples of docs/howto/marts.md, run as they stand there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pipeline.spark.lake import Lake
from tests.pipeline.history import Audit, attempt
from tests.pipeline.test_transforms import dead

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "marts.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(python|sql)\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.spec("DOC-2", "The how-to's examples of reading the marts run as they are written")
def test_the_examples_give_answers(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    with psycopg.connect(audit.dsn) as connection:
        connection.execute(
            "INSERT INTO tenants_tenant (tid, slug, name, status, created_at, updated_at, changed)"
            " VALUES ('acme0001', 'acme', '', 'active', now(), now(), 0)"
        )
    audit.add([attempt() for _ in range(30)] + [dead()])
    run()
    ran = []
    for kind, code in EXAMPLES:
        if kind == "sql":
            assert audit.ask(code), code
        elif "import duckdb" not in code or importlib.util.find_spec("duckdb"):
            names: dict[str, Any] = {}
            exec(code.replace("var/lake", lake.url), names)
            assert any(len(names[name]) for name in ("worst", "answer", "by_worker") if name in names), code
        ran.append(kind)
    assert ran.count("sql") == 3
    assert ran.count("python") == 3
