"""Procrastinate: 25 asyncio jobs at once in each process, woken by LISTEN and NOTIFY.

It stores no results.
"""

from __future__ import annotations

from typing import Any

import driver
import procrastinate

connector_class = procrastinate.PsycopgConnector if driver.is_worker() else procrastinate.SyncPsycopgConnector
app = procrastinate.App(connector=connector_class(conninfo=driver.STORE))


@app.task(name="handle")
async def handle(payload: dict[str, Any]) -> None:
    driver.handle(payload)


def main() -> None:
    if driver.is_worker():
        app.run_worker(concurrency=25, wait=True)
        return
    with app.open():
        app.schema_manager.apply_schema()
        driver.serve(
            driver.answer_with(
                lambda payload: handle.defer(payload=payload),
                lambda payloads: handle.batch_defer(*({"payload": payload} for payload in payloads)),
            ),
            ["procrastinate", "psycopg"],
        )


if __name__ == "__main__":
    main()
