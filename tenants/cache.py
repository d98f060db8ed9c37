"""slug -> Tenant without a query: a snapshot in the process that follows the rows.

A tenant is read when it is first asked for. From then on one small query every two seconds, in a thread of
its own, brings what has changed, however many tenants there are. While PostgreSQL is down the snapshot serves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from django.db import Error, connection
from django.db.models import QuerySet

from core.conf import conf
from core.errors import Unavailable
from tenants import models
from tenants.auth import jwks
from tenants.domain import Rates, TenantSnapshot

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_SECONDS = 2.0  # so that a suspension is in force within 5 s everywhere
SWEEP_SECONDS = 60.0  # deleted rows leave no change behind: those we hold are looked up now and then
UNKNOWN_SECONDS = 30.0  # an unknown name is not looked up again for so long; a new row ends that earlier
UNKNOWN_LIMIT = 10_000

# Rows changed by transactions that the last look could not see yet. Compared by transaction, not by time: a
# change committed late has an early `updated_at` and would be missed. Ids above the snapshot are from another
# cluster (a restored dump), and are not changes.
_CHANGES = """
    SELECT pg_snapshot_xmin(seen)::text::bigint, tenant.tid, tenant.slug
    FROM pg_current_snapshot() AS seen
    LEFT JOIN tenants_tenant AS tenant
      ON tenant.changed >= %s AND tenant.changed < pg_snapshot_xmax(seen)::text::bigint
"""


class Issuer(msgspec.Struct, frozen=True):
    """A tenant's own issuer of tokens: its keys, or the URL where they are."""

    name: str
    jwks_url: str
    keys: dict[str, jwks.Key]
    producer_audience: str
    worker_audience: str


class Entry(msgspec.Struct, frozen=True):
    tenant: TenantSnapshot
    issuers: tuple[Issuer, ...]
    version: int
    kept: dict[str, Any] = {}


# What another app keeps of these tenants: tid -> a value, for those that have one.
Loader = Callable[[list[str]], dict[str, Any]]


class TenantCache:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_slug: dict[str, Entry] = {}
        self._slugs: dict[str, str] = {}  # tid -> slug
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._follower: threading.Thread | None = None
        self._stopped = threading.Event()
        self._since: int | None = None
        self._swept = clock()
        self._loaders: dict[str, Loader] = {}

    def keep(self, name: str, loader: Loader) -> None:
        """Have something else of every tenant in the snapshot. A change of it must change the tenant's row too, by a
        trigger as that of the issuers: it is read again with the row, after it, and so is never older."""
        self._loaders[name] = loader

    def kept(self, name: str, tenant: TenantSnapshot) -> Any:
        """What is kept under that name of a tenant in the snapshot, or None: a dict lookup, for the hot path."""
        entry = self._by_slug.get(tenant.slug)
        return None if entry is None or entry.tenant.tid != tenant.tid else entry.kept.get(name)

    def known(self, slug: str) -> TenantSnapshot | None:
        """The tenant if it is in the snapshot: a dict lookup, for the hot path."""
        entry = self._by_slug.get(slug)
        return None if entry is None else entry.tenant

    def find(self, slug: str) -> TenantSnapshot | None:
        """The tenant of that name, or None. Reads the row when the name is new, so not on an event loop."""
        entry = self.entry(slug)
        return None if entry is None else entry.tenant

    def find_tid(self, tid: str) -> TenantSnapshot | None:
        """The tenant of that id, or None, as `find`."""
        slug = self._slugs.get(tid)
        if slug is None:
            self._load([tid])
            slug = self._slugs.get(tid)
        return None if slug is None else self.find(slug)

    def issuer(self, slug: str, name: str) -> Issuer | None:
        """The tenant's issuer of that name, or None, as `find`."""
        entry = self.entry(slug)
        for issuer in entry.issuers if entry is not None else ():
            if issuer.name == name:
                return issuer
        return None

    def entry(self, slug: str) -> Entry | None:
        self._follow()
        entry = self._by_slug.get(slug)
        if entry is not None:
            return entry
        until = self._unknown.get(slug)
        if until is not None and self._clock() < until:
            return None
        # NUL and lone surrogates are no text for PostgreSQL, and no name that a row can have.
        if len(slug) > 128 or not slug.isascii() or not slug.isprintable():
            return None
        try:
            found = self._entries(_rows().filter(slug=slug))
        except Error as error:
            raise Unavailable("The tenants cannot be read right now.", retry_after_seconds=5) from error
        self._keep(found)
        if not found:
            with self._lock:
                self._unknown[slug] = self._clock() + UNKNOWN_SECONDS
                while len(self._unknown) > UNKNOWN_LIMIT:
                    self._unknown.popitem(last=False)
        return self._by_slug.get(slug)

    def refresh(self, tids: Iterable[str]) -> None:
        """Read these rows again now: for whoever has just changed them in this process."""
        self._load(list(tids))

    def poll(self) -> None:
        """One look at what has changed. Called by the follower; raises django.db.Error."""
        with connection.cursor() as cursor:
            if self._since is None:
                # What was loaded before this moment may have changed since: look at all we hold once.
                cursor.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
                row = cursor.fetchone()
                self._since = int(row[0])
                changed = list(self._slugs)
            else:
                cursor.execute(_CHANGES, [self._since])
                rows = cursor.fetchall()
                self._since = int(rows[0][0])
                # Only what somebody here has asked for: a process need not hold every tenant there is.
                changed = [tid for _, tid, slug in rows if tid in self._slugs or slug in self._unknown]
        now = self._clock()
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            changed = list({*changed, *self._slugs})
        if changed:
            self._load(changed)

    def stop(self) -> None:
        """Forget everything and end the follower; the next question starts anew."""
        self._stopped.set()
        if self._follower is not None:
            self._follower.join(timeout=5)
        self.forget()

    def forget(self) -> None:
        """Start anew, as in a forked child, which has inherited the snapshot but not its follower."""
        self._lock = threading.Lock()
        self._by_slug, self._slugs, self._unknown = {}, {}, OrderedDict()
        self._follower, self._stopped = None, threading.Event()
        self._since, self._swept = None, self._clock()

    def _load(self, tids: list[str]) -> None:
        """Take the rows of these ids into the snapshot, and the ids without a row out of it."""
        try:
            found = self._entries(_rows().filter(tid__in=tids))
        except Error as error:
            raise Unavailable("The tenants cannot be read right now.", retry_after_seconds=5) from error
        self._keep(found)
        gone = set(tids) - {entry.tenant.tid for entry in found}
        with self._lock:
            for tid in gone:
                slug = self._slugs.pop(tid, None)
                if slug is not None:
                    self._by_slug.pop(slug, None)

    def _entries(self, rows: Iterable[models.Tenant]) -> list[Entry]:
        found = list(rows)
        kept = {name: loader([row.tid for row in found]) for name, loader in self._loaders.items()} if found else {}
        return [
            entry_of(row, {name: values[row.tid] for name, values in kept.items() if row.tid in values})
            for row in found
        ]

    def _keep(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            tid, slug = entry.tenant.tid, entry.tenant.slug
            with self._lock:
                former_slug = self._slugs.get(tid)
                former = None if former_slug is None else self._by_slug.get(former_slug)
                # Two threads may have read the row, before and after a change: the one that comes here last
                # must not bring the older state back.
                if former is not None and former.version >= entry.version:
                    continue
                if former_slug is not None and former_slug != slug:
                    self._by_slug.pop(former_slug, None)
                self._by_slug[slug] = entry
                self._slugs[tid] = slug
                self._unknown.pop(slug, None)

    def _follow(self) -> None:
        if self._follower is not None:
            return
        with self._lock:
            if self._follower is None:
                self._follower = threading.Thread(
                    target=self._run, args=[self._stopped], name="tenant-directory", daemon=True
                )
                self._follower.start()

    def _run(self, stopped: threading.Event) -> None:
        is_down = False
        try:
            while not stopped.wait(POLL_SECONDS):
                try:
                    self.poll()
                    is_down = False
                except (Error, Unavailable) as error:
                    connection.close()  # the next look opens a new one
                    if not is_down:
                        log.warning("tenants cannot be followed, the last known state is used: %s", error)
                    is_down = True
        finally:
            connection.close()


def entry_of(row: models.Tenant, kept: dict[str, Any]) -> Entry:
    queues, limits = conf().queues, conf().limits
    tenant = TenantSnapshot(
        tid=row.tid,
        slug=row.slug,
        suspended=row.is_suspended,
        payload_bytes=_or(row.payload_bytes, queues.payload_bytes),
        result_bytes=_or(row.result_bytes, queues.result_bytes),
        depth=_or(row.depth, limits.depth),
        rates=Rates(
            create=_or(row.create_per_second, limits.create_per_second),
            claim=_or(row.claim_per_second, limits.claim_per_second),
            admin=_or(row.admin_per_second, limits.admin_per_second),
            webhook=_or(row.webhook_per_second, limits.webhook_per_second),
        ),
        retention_ms=1000 * _or(row.retention_seconds, queues.retention_seconds),
        dead_retention_ms=1000 * _or(row.dead_retention_seconds, queues.dead_retention_seconds),
        is_idempotency_strict=_or(row.is_idempotency_strict, limits.idempotency_strict),
        is_lease_token_required=_or(row.is_lease_token_required, limits.lease_token_required),
    )
    issuers = tuple(
        Issuer(
            name=each.issuer,
            jwks_url=each.jwks_url,
            keys={} if each.jwks_url else jwks.keys_of(each.jwks),
            producer_audience=each.producer_audience,
            worker_audience=each.worker_audience,
        )
        for each in row.issuers.all()
    )
    return Entry(tenant, issuers, row.version, kept)


def _rows() -> QuerySet[models.Tenant]:
    return models.Tenant.objects.prefetch_related("issuers")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


tenant_cache = TenantCache()
os.register_at_fork(after_in_child=tenant_cache.forget)
