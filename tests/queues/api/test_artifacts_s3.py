"""Artifacts in an S3 bucket of a real server, with outages, and their deletion."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from django.core.files.storage import FileSystemStorage

from core import threadpool
from core.conf import conf
from core.errors import ConfigError
from core.redis.connections import client as redis_client
from queues import artifacts, maintenance, periodic_tasks
from queues.models import AuditedResult
from tests.conftest import free_port
from tests.queues.api.artifacts import CONTENT, inline_artifact, result_with
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS, Configure
from tests.queues.api.redis_dump import dump_redis
from tests.queues.api.tasks import claim_task, enqueue_task
from tests.s3_server import BUCKET, S3Server

UseStorage = Callable[..., None]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    s3 = S3Server()
    yield s3
    s3.resume()
    s3.process.kill()
    s3.process.wait()


@pytest.fixture
def use_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[UseStorage]:
    """Return a function that sets the storage of artifacts: `use_storage("file:///tmp/x")`."""

    def use(url: str) -> None:
        monkeypatch.setattr(artifacts, "conf", lambda: msgspec.structs.replace(conf(), artifacts=url))
        artifacts.storage.cache_clear()
        artifacts.storage_errors.cache_clear()

    yield use
    artifacts.storage.cache_clear()
    artifacts.storage_errors.cache_clear()


def bucket_url(url: str, bucket: str = BUCKET) -> str:
    return f"s3://{bucket}/some/where?endpoint_url={url}&region_name=eu-central-1&access_key=key&secret_key=secret"


@pytest_asyncio.fixture(loop_scope="session")
async def s3(server: S3Server, use_storage: UseStorage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Server]:
    monkeypatch.setattr(artifacts, "S3_READ_SECONDS", 1)
    monkeypatch.setattr(artifacts, "S3_CONNECT_SECONDS", 1)
    use_storage(bucket_url(server.url))
    yield server
    server.resume()
    server.clear()


async def claim_new_task(producer: Client, worker: Client) -> str:
    task = await enqueue_task(producer)
    await claim_task(worker)
    return f"{TASKS}/{task['id']}"


@pytest.mark.spec("ACK-4", "Artifacts can be stored in an S3 bucket")
async def test_artifact_is_stored_and_downloaded(
    producer: Client, worker: Client, stranger: Client, s3: S3Server, tenant: Any
) -> None:
    path = await claim_new_task(producer, worker)
    body = result_with(inline_artifact(), inline_artifact(b"", "empty"))
    response = await worker.post(f"{path}/result", body)
    assert response.status == 200, response.body
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert len(s3.list_names()) == 2
    assert all(name.startswith(f"some/where/{tenant.tid}/") for name in s3.list_names())
    mine, empty = response.json["artifacts"]
    assert mine["url"] == f"{path}/artifacts/{digest}"
    for url, content in ((mine["url"], CONTENT), (empty["url"], b"")):
        got = await producer.get(url)
        assert (got.status, got.body, got.headers["content-length"]) == (200, content, str(len(content)))
        assert (await stranger.get(url)).status == 404
    assert (await producer.get(f"{path}/artifacts/{'0' * 64}")).status == 404
    assert (await worker.post(f"{path}/result", body)).json == response.json
    assert (await worker.post(f"{path}/result", result_with(inline_artifact(b"other")))).code == "already_ended"
    assert len(s3.list_names()) == 2, "a refused submission leaves nothing"


async def hang_storage(s3: S3Server, use_storage: UseStorage) -> None:
    s3.hang()


async def refuse_connections(s3: S3Server, use_storage: UseStorage) -> None:
    use_storage(bucket_url(f"http://127.0.0.1:{free_port()}"))


async def use_unknown_host(s3: S3Server, use_storage: UseStorage) -> None:
    use_storage(bucket_url("http://no-such-host.invalid"))


async def use_unknown_bucket(s3: S3Server, use_storage: UseStorage) -> None:
    use_storage(bucket_url(s3.url, "no-such-bucket"))


OUTAGES = [hang_storage, refuse_connections, use_unknown_host, use_unknown_bucket]


@pytest.mark.spec("ACK-4", "While the storage is unavailable a result with artifacts gets a 503, and nothing changes")
@pytest.mark.parametrize("break_storage", OUTAGES)
async def test_unavailable_storage_is_a_503(
    producer: Client, worker: Client, s3: S3Server, use_storage: UseStorage, break_storage: Any
) -> None:
    path = await claim_new_task(producer, worker)
    other = await claim_new_task(producer, worker)
    before = dump_redis()
    await break_storage(s3, use_storage)
    refused = await worker.post(f"{path}/result", result_with(inline_artifact()))
    assert (refused.status, refused.code) == (503, "unavailable")
    assert refused.json["detail"] == "Artifacts cannot be stored right now."
    assert int(refused.headers["retry-after"]) >= 1
    several = {"results": [{"taskId": path.rpartition("/")[2]} | result_with(inline_artifact())]}
    item = (await worker.post(f"{TASKS}/batch/results", several)).json["results"][0]
    assert (item["error"], item["status"]) == ("unavailable", 503)
    assert dump_redis() == before
    # An artifact with its own URL does not need the storage.
    theirs = result_with({"name": "film", "url": "https://example.org/film.mp4"})
    assert (await worker.post(f"{other}/result", theirs)).status == 200
    s3.resume()
    use_storage(bucket_url(s3.url))
    assert (await worker.post(f"{path}/result", result_with(inline_artifact()))).status == 200


async def test_artifact_cannot_be_read_while_its_storage_is_unavailable(
    producer: Client, worker: Client, s3: S3Server, use_storage: UseStorage
) -> None:
    path = await claim_new_task(producer, worker)
    url = (await worker.post(f"{path}/result", result_with(inline_artifact()))).json["artifacts"][0]["url"]
    s3.hang()
    refused = await producer.get(url)
    assert (refused.status, refused.code) == (503, "unavailable")
    assert refused.json["detail"] == "Artifacts cannot be read right now."
    s3.resume()
    assert (await producer.get(url)).body == CONTENT


def find_files(name: str, directory: Path) -> list[Path]:
    return list(directory.rglob(name))


@pytest.mark.spec("ACK-4", "A storage that hangs delays only requests that need it")
async def test_hanging_storage_delays_no_other_request(
    producer: Client,
    worker: Client,
    admin: Client,
    s3: S3Server,
    use_storage: UseStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(artifacts, "S3_READ_SECONDS", 20)
    use_storage(bucket_url(s3.url))
    paths = [await claim_new_task(producer, worker) for _ in range(2 * threadpool.POOL_THREADS)]
    s3.hang()
    submissions = [worker.start("POST", f"{path}/result", result_with(inline_artifact())) for path in paths]
    async with asyncio.timeout(15):
        assert (await admin.get("/v1/codeq/admin/topics")).status == 200
        assert (await producer.get(TASKS)).status == 200
        assert (await enqueue_task(producer))["status"] == "PENDING"
    assert not any(submission.task.done() for submission in submissions)
    s3.resume()
    for submission in submissions:
        response = await submission.response()
        assert response is not None
        assert response.status in (200, 503)


async def run_cleanup() -> int:
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)
    return await threadpool.run_db(maintenance.cleanup, lambda: True)


@pytest.mark.spec(
    "CLN-1", "The artifacts of a task are deleted with it, from a directory and from a bucket; others stay"
)
@pytest.mark.parametrize("kind", ["directory", "bucket"])
async def test_artifacts_are_deleted_with_their_task(
    producer: Client,
    worker: Client,
    s3: S3Server,
    use_storage: UseStorage,
    configure_tenant: Configure,
    tmp_path: Path,
    kind: str,
) -> None:
    if kind == "directory":
        use_storage(f"file://{tmp_path}")

    def list_names() -> list[str]:
        if kind == "bucket":
            return s3.list_names()
        return [str(path) for path in tmp_path.rglob("*") if path.is_file()]

    kept = await claim_new_task(producer, worker)
    await worker.post(f"{kept}/result", result_with(inline_artifact()))
    configure_tenant(retention_ms=0)
    path = await claim_new_task(producer, worker)
    body = result_with(inline_artifact(), inline_artifact(b"more", "more"))
    mine = (await worker.post(f"{path}/result", body)).json["artifacts"]
    assert len(list_names()) == 3
    assert await run_cleanup() == 1
    (left,) = list_names()
    assert kept.rpartition("/")[2] in left
    if kind == "directory":
        assert find_files(path.rpartition("/")[2], tmp_path) == [], "an empty directory is left"
    # The audit still has their names.
    assert (await producer.get(f"{path}/result")).json["result"]["artifacts"] == mine
    gone = await producer.get(mine[0]["url"])
    assert (gone.status, gone.code) == (404, "not_found")
    assert (await producer.get(f"{kept}/artifacts/{hashlib.sha256(CONTENT).hexdigest()}")).body == CONTENT


@pytest.mark.spec("CLN-1", "A task whose artifacts cannot be deleted now waits; the tasks after it are deleted")
async def test_cleanup_continues_while_the_storage_is_unavailable(
    producer: Client, worker: Client, s3: S3Server, configure_tenant: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure_tenant(retention_ms=0)
    with_files = [await claim_new_task(producer, worker) for _ in range(3)]
    for path in with_files:
        assert (await worker.post(f"{path}/result", result_with(inline_artifact()))).status == 200
    without = [await claim_new_task(producer, worker) for _ in range(3)]
    for path in without:
        assert (await worker.post(f"{path}/result", result_with())).status == 200
    s3.hang()
    with caplog.at_level(logging.WARNING):
        assert await run_cleanup() == 3
    assert len([record for record in caplog.records if "cannot be deleted" in record.message]) == 1, (
        "one attempt per run"
    )
    s3.resume()
    assert len(s3.list_names()) == 3
    assert await run_cleanup() == 3
    assert s3.list_names() == []
    assert await run_cleanup() == 0
    assert not [key for key in redis_client().keys("*") if b":task:" in key]
    ids = [path.rpartition("/")[2] for path in with_files + without]
    assert await threadpool.run_db(AuditedResult.objects.filter(pk__in=ids).count) == 6


async def test_storage_outage_does_not_fill_redis(
    producer: Client, worker: Client, s3: S3Server, configure_tenant: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_POSTPONED", 1)
    configure_tenant(retention_ms=0)
    for _ in range(3):
        path = await claim_new_task(producer, worker)
        assert (await worker.post(f"{path}/result", result_with(inline_artifact()))).status == 200
    s3.hang()
    assert await run_cleanup() == 3
    s3.resume()


async def test_cleanup_of_an_administrator_deletes_artifacts(
    producer: Client, worker: Client, admin: Client, s3: S3Server, configure_tenant: Configure
) -> None:
    configure_tenant(retention_ms=0)
    for _ in range(2):
        path = await claim_new_task(producer, worker)
        assert (await worker.post(f"{path}/result", result_with(inline_artifact()))).status == 200
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)
    assert (await admin.post("/v1/codeq/admin/tasks/cleanup", {"limit": 1})).json["deleted"] == 1
    assert len(s3.list_names()) == 1
    assert (await admin.post("/v1/codeq/admin/tasks/cleanup")).json["deleted"] == 1
    assert s3.list_names() == []


def test_setting_selects_the_storage(use_storage: UseStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def location(text: str) -> Any:
        use_storage(text)
        storage = artifacts.storage()
        assert isinstance(storage, FileSystemStorage)
        return storage.location

    assert location("") == str(conf().home_path / "artifacts")
    assert location(f"file://{tmp_path}") == str(tmp_path)
    for wrong in ("ftp://example.org/", "s3://", "s3:///prefix", "s3://bucket?acl=public-read"):
        use_storage(wrong)
        with pytest.raises(ConfigError, match="CODEQ_ARTIFACTS"):
            artifacts.storage()
    monkeypatch.setitem(sys.modules, "storages.backends.s3", None)
    use_storage("s3://bucket/prefix")
    with pytest.raises(ConfigError, match="django-storages"):
        artifacts.storage()
