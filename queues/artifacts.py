"""What workers hand in beside a result: kept by a Django storage, under a name that is ours and never theirs.

The name is a digest of the content, so the same submission again stores nothing new and answers the same. A caller's
words (the artifact's name, its type) are only ever data.
"""

from __future__ import annotations

import hashlib
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

from codeq_site import errors
from codeq_site.conf import conf
from codeq_site.errors import ConfigError
from queues import archive, selectors
from tenants.tenant import Tenant

ID = re.compile(r"[0-9a-f]{64}")
TASK_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class New(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact on its way in: bytes, or an address where they are."""

    name: str
    url: str | None = None
    content: bytes | None = None
    content_type: str | None = None


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """An artifact as it is stored with the result."""

    name: str
    url: str
    content_type: str | None = None
    size: int | None = None


def keep(tid: str, task_id: str, new: Sequence[New]) -> tuple[list[Kept], list[str]]:
    """Store what is inline: all of them as they are kept with the result, and the paths that are new.

    Done before the result is submitted: `take_back` if that is refused. TaskNotFound for what is no id, as it becomes
    part of a path.
    """
    if not TASK_ID.fullmatch(task_id):
        raise errors.TaskNotFound
    kept, stored = [], []
    for each in new:
        if each.content is None:
            kept.append(Kept(name=each.name, url=each.url or "", content_type=each.content_type))
            continue
        digest = hashlib.sha256(each.content).hexdigest()
        path = _path(tid, task_id, digest)
        try:
            if not storage().exists(path):
                stored.append(storage().save(path, ContentFile(each.content)))
        except OSError as error:
            take_back(stored)
            raise errors.Unavailable("Artifacts cannot be stored right now.", retry_after_seconds=5) from error
        kept.append(
            Kept(name=each.name, url=_url(task_id, digest), content_type=each.content_type, size=len(each.content))
        )
    return kept, stored


def take_back(paths: Iterable[str]) -> None:
    """Remove what was stored for a submission that was then refused."""
    for path in paths:
        storage().delete(path)


def opened(tenant: Tenant, task_id: str, artifact_id: str) -> tuple[Kept, BinaryIO]:
    """An artifact of a task's result, to be read. NotFound unless the result of that task names it."""
    try:
        _, result = selectors.result(tenant, task_id).now()
    except errors.TaskNotFound:
        _, result = archive.result(tenant, task_id)
    kept = msgspec.json.decode(result.artifacts, type=list[Kept]) if result.artifacts is not None else []
    for each in kept:
        if ID.fullmatch(artifact_id) and each.url == _url(task_id, artifact_id):
            try:
                return each, cast(BinaryIO, storage().open(_path(tenant.tid, task_id, artifact_id)))
            except FileNotFoundError:
                break
    raise errors.NotFound("There is no such artifact.")


def _url(task_id: str, digest: str) -> str:
    return f"/v1/codeq/tasks/{task_id}/artifacts/{digest}"


def _path(tid: str, task_id: str, digest: str) -> str:
    return str(PurePosixPath(tid, task_id[-2:], task_id, digest))


@cache
def storage() -> Storage:
    """A directory under CODEQ_HOME, or what `CODEQ_ARTIFACTS` names: file:///path, s3://bucket/prefix?endpoint_url=…"""
    address = conf().artifacts
    parts = urlsplit(address)
    if parts.scheme in ("", "file"):
        directory = parts.path if address else str(conf().home_path / "artifacts")
        return FileSystemStorage(location=directory, file_permissions_mode=0o600, directory_permissions_mode=0o700)
    if parts.scheme == "s3":
        try:
            backend = import_string("storages.backends.s3.S3Storage")
        except ImportError as error:
            raise ConfigError("CODEQ_ARTIFACTS names an S3 bucket: install django-storages[s3].") from error
        options = dict(parse_qsl(parts.query))
        return cast(Storage, backend(bucket_name=parts.netloc, location=parts.path.strip("/"), **options))
    raise ConfigError("CODEQ_ARTIFACTS: file:///a/directory or s3://bucket/prefix")
