"""The recorded numbers of database queries of each page, in query_counts.json.

After an intended change, run the tests with `CODEQ_TEST_WRITE_COUNTS=1` to update the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.test.utils import CaptureQueriesContext

COUNTS = Path(__file__).with_name("query_counts.json")
QUERY_LIMIT = 20


def assert_query_count(page: str, queries: CaptureQueriesContext) -> None:
    """Check that the page's queries are below the limit, and as many as recorded."""
    statements = [query["sql"] for query in queries.captured_queries if not _is_overhead(query["sql"])]
    assert len(statements) <= QUERY_LIMIT, statements
    recorded: dict[str, int] = json.loads(COUNTS.read_text())
    if os.environ.get("CODEQ_TEST_WRITE_COUNTS"):
        recorded[page] = len(statements)
        COUNTS.write_text(json.dumps(dict(sorted(recorded.items())), indent=2) + "\n")
    assert recorded.get(page) == len(statements), statements


def _is_overhead(sql: str) -> bool:
    """Whether the statement belongs to a transaction, its time limit, or the session."""
    return sql.startswith(("SAVEPOINT", "RELEASE", "SELECT current_setting", "SELECT set_config"))
