"""Artifacts: files that workers submit with a result, kept in a Django storage.

The name of a stored file is the digest of its content, so a repeated submission stores no second file. The name and
the type that a worker gives are never part of a path.
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

ARTIFACT_ID = re.compile(r"[0-9a-f]{64}")


class NewArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact to store: its content, or the URL at which the worker keeps it."""

    name: str
    url: str | None = None
    content: bytes | None = None
    content_type: str | None = None


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """An artifact in a stored result."""

    name: str
    url: str
    content_type: str | None = None
    size: int | None = None


def store(tid: str, task_id: str, new: Sequence[NewArtifact]) -> tuple[list[StoredArtifact], list[str]]:
    """Store the files of the artifacts that were submitted with their content.

    Returns all artifacts as the result stores them, and the paths of the new files. Call it before the result is
    submitted. If the submission fails, pass the paths to `discard`. Raises TaskNotFound for an invalid task id, because
    the id becomes part of a path.
    """
    validation.check_id(task_id)
    stored, new_paths = [], []
    for artifact in new:
        if artifact.content is None:
            stored.append(
                StoredArtifact(name=artifact.name, url=artifact.url or "", content_type=artifact.content_type)
            )
            continue
        digest = hashlib.sha256(artifact.content).hexdigest()
        path = _path(tid, task_id, digest)
        try:
            if not storage().exists(path):
                new_paths.append(storage().save(path, ContentFile(artifact.content)))
        except storage_errors() as error:
            discard(new_paths)
            raise errors.Unavailable("Artifacts cannot be stored right now.", retry_after_seconds=5) from error
        stored.append(
            StoredArtifact(
                name=artifact.name,
                url=_url(task_id, digest),
                content_type=artifact.content_type,
                size=len(artifact.content),
            )
        )
    return stored, new_paths


def discard(paths: Iterable[str]) -> None:
    """Delete the new files of a submission that failed.

    If the storage is unavailable, the files stay and are deleted later, with the other files of the task.
    """
    try:
        for path in paths:
            storage().delete(path)
    except storage_errors() as error:
        log.warning("the artifacts of a failed submission could not be deleted: %s", error)


class Remover:
    """Deletes the files of tasks before the cleanup deletes the tasks.

    After the first storage error it deletes no more files. Create one `Remover` for each cleanup.
    """

    def __init__(self) -> None:
        self.is_unavailable = False

    def remove(self, tid: str, task_ids: Sequence[str]) -> set[str]:
        """Delete the files of these tasks. Returns the tasks that still have files.

        The audit rows show which tasks have artifacts.
        """
        rows = AuditedResult.objects.filter(pk__in=task_ids, tenant_id=tid).exclude(artifacts="")
        remaining = {str(pk) for pk, text in rows.values_list("pk", "artifacts") if f'"{_url(str(pk), "")}' in text}
        for task_id in sorted(remaining):
            if self.is_unavailable:
                break
            try:
                _delete_directory(_directory(tid, task_id))
            except storage_errors() as error:
                self.is_unavailable = True
                log.warning("artifacts of ended tasks cannot be deleted now: %s", error)
            else:
                remaining.discard(task_id)
        return remaining


def _delete_directory(directory: str) -> None:
    """Delete all files of one task, including those of interrupted submissions."""
    try:
        _, names = storage().listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        storage().delete(f"{directory}/{name}")
    if isinstance(storage(), FileSystemStorage):
        storage().delete(directory)


def open_artifact(tenant: TenantSnapshot, task_id: str, artifact_id: str) -> tuple[StoredArtifact, BinaryIO]:
    """Open an artifact for reading.

    Raises NotFound if the result of the task has no such artifact, ResultNotFound if the task has no result,
    and Unavailable if the storage cannot be read.
    """
    try:
        _, result = selectors.result(tenant, task_id).run_sync()
    except errors.TaskNotFound:
        _, result = audit_reader.audited_result(tenant, task_id)
    stored = msgspec.json.decode(result.artifacts, type=list[StoredArtifact]) if result.artifacts is not None else []
    for artifact in stored:
        if ARTIFACT_ID.fullmatch(artifact_id) and artifact.url == _url(task_id, artifact_id):
            try:
                file = cast(BinaryIO, storage().open(_path(tenant.tid, task_id, artifact_id)))
                # A remote storage fetches the file at the first access. Do it here, where an error becomes a 503.
                file.seek(0)
                return artifact, file
            except FileNotFoundError:
                break
            except storage_errors() as error:
                raise errors.Unavailable("Artifacts cannot be read right now.", retry_after_seconds=5) from error
    raise errors.NotFound("The result has no such artifact, or the artifact has been deleted with its task.")


def _url(task_id: str, digest: str) -> str:
    return f"/v1/codeq/tasks/{task_id}/artifacts/{digest}"


def _directory(tid: str, task_id: str) -> str:
    return str(PurePosixPath(tid, task_id[-2:], task_id))


def _path(tid: str, task_id: str, digest: str) -> str:
    return f"{_directory(tid, task_id)}/{digest}"


@cache
def storage() -> Storage:
    """Return the storage that `CODEQ_ARTIFACTS` names, by default a directory under CODEQ_HOME.

    The setting is file:///path or s3://bucket/prefix?endpoint_url=… The credentials of S3 are in the URL, or in
    the places where the AWS tools look for credentials.
    """
    address = conf().artifacts
    parts = urlsplit(address)
    if parts.scheme in ("", "file"):
        directory = parts.path if address else str(conf().home_path / "artifacts")
        return FileSystemStorage(location=directory, file_permissions_mode=0o600, directory_permissions_mode=0o700)
    if parts.scheme == "s3" and parts.netloc:
        return _s3(parts.netloc, parts.path.strip("/"), dict(parse_qsl(parts.query)))
    raise ConfigError("CODEQ_ARTIFACTS is not valid. Use file:///directory or s3://bucket/prefix.")


S3_OPTIONS = ("endpoint_url", "region_name", "addressing_style", "access_key", "secret_key", "session_profile")
# A worker waits for the response to its result, and occupies one of the few storage threads meanwhile.
S3_CONNECT_SECONDS, S3_READ_SECONDS, S3_MAX_ATTEMPTS = 3, 10, 2


def _s3(bucket: str, prefix: str, options: dict[str, str]) -> Storage:
    try:
        backend = import_string("storages.backends.s3.S3Storage")
    except ImportError as error:
        raise ConfigError(
            "CODEQ_ARTIFACTS names an S3 bucket: install codeq-server[s3], or django-storages[s3]."
        ) from error
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    if unknown := set(options) - set(S3_OPTIONS):
        raise ConfigError(
            f"CODEQ_ARTIFACTS: unknown options {', '.join(sorted(unknown))}. Allowed: {', '.join(S3_OPTIONS)}."
        )
    config = Config(
        s3={"addressing_style": options.pop("addressing_style", "auto")},
        connect_timeout=S3_CONNECT_SECONDS,
        read_timeout=S3_READ_SECONDS,
        retries={"mode": "standard", "max_attempts": S3_MAX_ATTEMPTS},
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
def storage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that an unavailable storage raises."""
    if urlsplit(conf().artifacts).scheme != "s3":
        return (OSError,)
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, Boto3Error, BotoCoreError, ClientError)
