"""What workers hand in beside a result: kept by a Django storage, under a name that is ours and never theirs.

The name is a digest of the content, so the same submission again stores nothing new and answers the same. A caller's
words (the artifact's name, its type) are only ever data.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import BinaryIO, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, Storage
from django.utils.module_loading import import_string

from core import errors
from core.conf import conf
from core.errors import ConfigError
from queues import selectors, validation
from queues.audit import audit_reader
from queues.models import AuditedResult
from tenants.domain import TenantSnapshot

log = logging.getLogger(__name__)

ID = re.compile(r"[0-9a-f]{64}")


class NewArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact on its way in: bytes, or an address where they are."""

    name: str
    url: str | None = None
    content: bytes | None = None
    content_type: str | None = None


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """An artifact as it is stored with the result."""

    name: str
    url: str
    content_type: str | None = None
    size: int | None = None


def keep(tid: str, task_id: str, new: Sequence[NewArtifact]) -> tuple[list[StoredArtifact], list[str]]:
    """Store what is inline: all of them as they are kept with the result, and the paths that are new.

    Done before the result is submitted: `take_back` if that is refused. TaskNotFound for what is no id, as it becomes
    part of a path.
    """
    validation.check_id(task_id)
    kept, stored = [], []
    for each in new:
        if each.content is None:
            kept.append(StoredArtifact(name=each.name, url=each.url or "", content_type=each.content_type))
            continue
        digest = hashlib.sha256(each.content).hexdigest()
        path = _path(tid, task_id, digest)
        try:
            if not storage().exists(path):
                stored.append(storage().save(path, ContentFile(each.content)))
        except failures() as error:
            take_back(stored)
            raise errors.Unavailable("Artifacts cannot be stored right now.", retry_after_seconds=5) from error
        kept.append(
            StoredArtifact(
                name=each.name, url=_url(task_id, digest), content_type=each.content_type, size=len(each.content)
            )
        )
    return kept, stored


def take_back(paths: Iterable[str]) -> None:
    """Remove what was stored for a submission that was then refused.

    Where the storage is away by now, it goes with whatever else is kept for its task.
    """
    try:
        for path in paths:
            storage().delete(path)
    except failures() as error:
        log.warning("artifacts of a refused submission stay for now: %s", error)


class Remover:
    """Removes what is kept for tasks that are about to go. A storage that is away is asked once in a run."""

    def __init__(self) -> None:
        self.is_away = False

    def remove(self, tid: str, task_ids: Sequence[str]) -> set[str]:
        """The tasks whose artifacts are still there. What is kept for a task is known from the audit."""
        rows = AuditedResult.objects.filter(pk__in=task_ids, tenant_id=tid).exclude(artifacts="")
        left = {str(pk) for pk, text in rows.values_list("pk", "artifacts") if f'"{_url(str(pk), "")}' in text}
        for task_id in sorted(left):
            if self.is_away:
                break
            try:
                _remove_all(str(PurePosixPath(_path(tid, task_id, "x")).parent))
            except failures() as error:
                self.is_away = True
                log.warning("artifacts of ended tasks cannot be removed now: %s", error)
            else:
                left.discard(task_id)
        return left


def _remove_all(directory: str) -> None:
    """Everything that was stored for one task; of a submission that was never answered too."""
    try:
        _, names = storage().listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        storage().delete(f"{directory}/{name}")
    if isinstance(storage(), FileSystemStorage):
        storage().delete(directory)


def open_artifact(tenant: TenantSnapshot, task_id: str, artifact_id: str) -> tuple[StoredArtifact, BinaryIO]:
    """An artifact of a task's result, to be read. NotFound unless the result of that task names it."""
    try:
        _, result = selectors.result(tenant, task_id).run_sync()
    except errors.TaskNotFound:
        _, result = audit_reader.audited_result(tenant, task_id)
    kept = msgspec.json.decode(result.artifacts, type=list[StoredArtifact]) if result.artifacts is not None else []
    for each in kept:
        if ID.fullmatch(artifact_id) and each.url == _url(task_id, artifact_id):
            try:
                file = cast(BinaryIO, storage().open(_path(tenant.tid, task_id, artifact_id)))
                # A storage elsewhere fetches it now, while there still is another answer than the file.
                file.seek(0)
                return each, file
            except FileNotFoundError:
                break
            except failures() as error:
                raise errors.Unavailable("Artifacts cannot be read right now.", retry_after_seconds=5) from error
    raise errors.NotFound("There is no such artifact, or its retention is over.")


def _url(task_id: str, digest: str) -> str:
    return f"/v1/codeq/tasks/{task_id}/artifacts/{digest}"


def _path(tid: str, task_id: str, digest: str) -> str:
    return str(PurePosixPath(tid, task_id[-2:], task_id, digest))


@cache
def storage() -> Storage:
    """A directory under CODEQ_HOME, or what `CODEQ_ARTIFACTS` names: file:///path, s3://bucket/prefix?endpoint_url=…

    The keys of S3 are where AWS's own programs look for them, or in the address.
    """
    address = conf().artifacts
    parts = urlsplit(address)
    if parts.scheme in ("", "file"):
        directory = parts.path if address else str(conf().home_path / "artifacts")
        return FileSystemStorage(location=directory, file_permissions_mode=0o600, directory_permissions_mode=0o700)
    if parts.scheme == "s3" and parts.netloc:
        return _s3(parts.netloc, parts.path.strip("/"), dict(parse_qsl(parts.query)))
    raise ConfigError("CODEQ_ARTIFACTS: file:///a/directory or s3://bucket/prefix")


S3_OPTIONS = ("endpoint_url", "region_name", "addressing_style", "access_key", "secret_key", "session_profile")
# A worker waits for the answer to its result, and one of the few threads for the database with it.
S3_CONNECT_SECONDS, S3_READ_SECONDS, S3_TRIES = 3, 10, 2


def _s3(bucket: str, prefix: str, options: dict[str, str]) -> Storage:
    try:
        backend = import_string("storages.backends.s3.S3Storage")
    except ImportError as error:
        raise ConfigError("CODEQ_ARTIFACTS names an S3 bucket: install codeq[s3], or django-storages[s3].") from error
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    if unknown := set(options) - set(S3_OPTIONS):
        raise ConfigError(f"CODEQ_ARTIFACTS: {', '.join(sorted(unknown))} is none of {', '.join(S3_OPTIONS)}")
    config = Config(
        s3={"addressing_style": options.pop("addressing_style", "auto")},
        connect_timeout=S3_CONNECT_SECONDS,
        read_timeout=S3_READ_SECONDS,
        retries={"mode": "standard", "max_attempts": S3_TRIES},
    )
    return cast(
        Storage,
        backend(
            bucket_name=bucket,
            location=prefix,
            client_config=config,
            transfer_config=TransferConfig(use_threads=False),
            **options,
        ),
    )


@cache
def failures() -> tuple[type[Exception], ...]:
    """What the storage raises when it cannot: Django's own an OSError, that of S3 three families of its own."""
    if urlsplit(conf().artifacts).scheme != "s3":
        return (OSError,)
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, Boto3Error, BotoCoreError, ClientError)
