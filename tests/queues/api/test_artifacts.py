"""Artifacts: stored by digest, downloaded only by their tenant, harmless under any name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.core.files.storage import FileSystemStorage

from core import threadpool
from core.redis.connections import client as redis_client
from queues import artifacts, periodic_tasks
from queues.api import conversion
from queues.filters import filters
from tests.queues.api.artifacts import CONTENT, inline_artifact, result_with
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import SOUTH, TASKS
from tests.queues.api.tasks import claim_task, enqueue_task

MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
def artifact_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of the artifacts."""
    directory = tmp_path / "artifacts"
    storage = FileSystemStorage(directory, file_permissions_mode=0o600, directory_permissions_mode=0o700)
    monkeypatch.setattr(artifacts, "storage", lambda: storage)
    yield directory
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(directory)]
    assert outside == []


def list_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.spec("ACK-4", "Artifacts are submitted inline or by URL, stored, and downloaded through the API")
async def test_artifacts_inline_and_by_url(producer: Client, worker: Client, artifact_directory: Path) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    elsewhere = {"name": "film", "url": "https://example.org/film.mp4"}
    body = result_with(inline_artifact(name="out put.bin", contentType="image/png"), elsewhere)
    response = await worker.post(f"{TASKS}/{task['id']}/result", body)
    assert response.status == 200, response.body
    mine, theirs = response.json["artifacts"]
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert mine == {
        "name": "out put.bin", "url": f"{TASKS}/{task['id']}/artifacts/{digest}", "contentType": "image/png",
        "size": len(CONTENT),
    }  # fmt: skip
    assert theirs == elsewhere
    (file,) = list_files(artifact_directory)
    assert file.read_bytes() == CONTENT
    assert file.stat().st_mode & 0o777 == 0o600
    for client in (producer, worker):
        got = await client.get(mine["url"])
        assert (got.status, got.body) == (200, CONTENT)
        assert got.headers["content-disposition"] == 'attachment; filename="out put.bin"'
        assert got.headers["content-type"] == "application/octet-stream"
        assert got.headers["x-content-type-options"] == "nosniff"
    assert (await producer.get(f"{TASKS}/{task['id']}/result")).json["result"]["artifacts"] == [mine, theirs]


@pytest.mark.spec("ACK-3", "A repeated submission stores nothing new; a refused one leaves no file")
async def test_repeat_stores_nothing_and_refusal_leaves_no_file(
    producer: Client, worker: Client, other_worker: Client, artifact_directory: Path
) -> None:
    task = await enqueue_task(producer)
    path = f"{TASKS}/{task['id']}/result"
    for early in (worker, other_worker):
        assert (await early.post(path, result_with(inline_artifact()))).status == 409
    assert list_files(artifact_directory) == []
    await claim_task(worker)
    first = await worker.post(path, result_with(inline_artifact()))
    again = await worker.post(path, result_with(inline_artifact()))
    assert (again.status, again.json) == (200, first.json)
    assert len(list_files(artifact_directory)) == 1
    other = await worker.post(path, result_with(inline_artifact(), inline_artifact(b"more", "more")))
    assert (other.status, other.code) == (409, "already_ended")
    (left,) = list_files(artifact_directory)
    assert left.read_bytes() == CONTENT


NAMES = [
    "../../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fx",
    "..",
    ".",
    "CON",
    "a" * 255,
    "a/b\\c",
    "\uff89\u2215",
    '"; x="y',
    "e\u202e",
]


@pytest.mark.spec("ACK-4", "An artifact's name is data, never a path")
@pytest.mark.parametrize("name", NAMES)
async def test_a_name_is_never_a_path(producer: Client, worker: Client, artifact_directory: Path, name: str) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/result", result_with(inline_artifact(b"x", name)))
    assert response.status == 200, response.body
    assert response.json["artifacts"][0]["name"] == name
    (file,) = list_files(artifact_directory)
    assert file.name == hashlib.sha256(b"x").hexdigest()
    got = await producer.get(response.json["artifacts"][0]["url"])
    assert (got.status, got.body) == (200, b"x")
    disposition = got.headers["content-disposition"]
    assert disposition.startswith("attachment")
    assert not re.findall("/|%2F|%5C", disposition)
    assert "\\" not in disposition.replace('\\"', "")


REFUSED: dict[str, dict[str, Any]] = {
    "no name": {"url": "https://example.org/"},
    "an empty name": {"name": "", "url": "https://example.org/"},
    "a line break in the name": {"name": "a\nb", "url": "https://example.org/"},
    "a null in the name": {"name": "a\0b", "url": "https://example.org/"},
    "a long name": {"name": "a" * 256, "url": "https://example.org/"},
    "neither": {"name": "a"},
    "both": {"name": "a", "url": "https://example.org/", "contentBase64": "eA=="},
    "a file's address": {"name": "a", "url": "file:///etc/passwd"},
    "no address": {"name": "a", "url": "x"},
    "no base64": {"name": "a", "contentBase64": "%%%%"},
    "base64 without its padding": {"name": "a", "contentBase64": "eA"},
    "base64 with spaces": {"name": "a", "contentBase64": "e A = ="},
    "base64 of addresses": {"name": "a", "contentBase64": "-_-_"},
    "a type with parameters": {"name": "a", "contentBase64": "eA==", "contentType": "text/html; charset=utf-7"},
    "a type with a line break": {"name": "a", "contentBase64": "eA==", "contentType": "text/html\n"},
    "an unknown field": {"name": "a", "contentBase64": "eA==", "size": 1},
}


@pytest.mark.parametrize("artifact", REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_artifact_is_refused(
    producer: Client, worker: Client, artifact_directory: Path, artifact: Any
) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/result", result_with(inline_artifact(), artifact))
    assert (response.status, response.code) == (400, "invalid_request")
    assert list_files(artifact_directory) == []
    assert (await producer.get(f"{TASKS}/{task['id']}")).json["status"] == "IN_PROGRESS"


async def test_size_and_number_of_artifacts_are_limited(
    producer: Client, worker: Client, artifact_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = msgspec.structs.replace(conversion.LIMITS, artifact_bytes=1000)
    monkeypatch.setattr(conversion, "LIMITS", limits)
    task = await enqueue_task(producer)
    await claim_task(worker)
    path = f"{TASKS}/{task['id']}/result"
    large = await worker.post(path, result_with(inline_artifact(b"x" * 1001)))
    assert (large.status, large.code) == (413, "payload_too_large")
    many = await worker.post(path, result_with(*[inline_artifact(b"x", str(number)) for number in range(101)]))
    assert many.status == 400
    assert list_files(artifact_directory) == []
    assert (await worker.post(path, result_with(inline_artifact(b"x" * 1000)))).status == 200


async def test_batch_keeps_artifacts_of_accepted_results(
    producer: Client, stranger: Client, worker: Client, artifact_directory: Path
) -> None:
    mine = await enqueue_task(producer)
    foreign = (await stranger.post(TASKS, {"command": "A", "payload": 1})).json
    await claim_task(worker)
    results = [{"taskId": task["id"]} | result_with(inline_artifact()) for task in (mine, foreign)]
    items = (await worker.post(f"{TASKS}/batch/results", {"results": results})).json["results"]
    assert "artifacts" in items[0]["result"]
    assert items[1]["error"] == "task_not_found"
    (file,) = list_files(artifact_directory)
    assert mine["id"] in str(file)


@pytest.mark.spec("TEN-3", "Only its tenant can download an artifact")
async def test_other_tenants_cannot_download_an_artifact(
    producer: Client, stranger: Client, client: MakeClient, worker: Client
) -> None:
    task, other = await enqueue_task(producer), await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim/batch")
    submitted = await worker.post(f"{TASKS}/{task['id']}/result", result_with(inline_artifact()))
    one = submitted.json["artifacts"][0]["url"]
    await worker.post(f"{TASKS}/{other['id']}/result", result_with())
    for caller in (stranger, client("worker", SOUTH)):
        refused = await caller.get(one)
        assert (refused.status, refused.code) == (404, "task_not_found")
    # Another task of the same tenant does not have the artifact either.
    assert (await producer.get(one.replace(task["id"], other["id"]))).code == "not_found"
    for wrong in ("0" * 64, "x", "..", "%2e%2e%2f" * 3, os.path.basename(one).upper()):
        assert (await producer.get(f"{TASKS}/{task['id']}/artifacts/{wrong}")).status == 404


async def test_a_full_disk_is_a_503_and_changes_nothing(
    producer: Client, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileSystemStorage):
        def save(self, *args: Any, **kwargs: Any) -> str:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts, "storage", lambda: Full())
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/result", result_with(inline_artifact()))
    assert (response.status, response.code) == (503, "unavailable")
    assert (await producer.get(f"{TASKS}/{task['id']}")).json["status"] == "IN_PROGRESS"


@pytest.mark.spec("CLN-3", "When Redis has deleted a task, the audit returns the same task, result and artifact")
async def test_audit_answers_for_a_task_that_redis_has_deleted(
    producer: Client, stranger: Client, worker: Client, admin: Client
) -> None:
    task = await enqueue_task(producer, payload={"n": 1.10}, webhook="https://example.org/hook", priority=4)
    await claim_task(worker)
    await worker.post(f"{TASKS}/{task['id']}/result", result_with(inline_artifact()) | {"result": {"ok": 1}})
    path = f"{TASKS}/{task['id']}"
    live, answered = (await producer.get(path)).json, (await producer.get(f"{path}/result")).json
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)
    redis_client().flushall()
    filters.cache_clear()
    audited = (await producer.get(path)).json
    assert audited == live
    read = (await producer.get(f"{path}/result")).json
    assert read["result"] == answered["result"]
    assert (await producer.get(read["result"]["artifacts"][0]["url"])).body == CONTENT
    for response in (await stranger.get(path), await stranger.get(f"{path}/result"), await stranger.get(f"{path}x")):
        assert (response.status, response.code) == (404, "task_not_found")
