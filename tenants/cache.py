"""A cache of tenants in each process, kept current by a background thread.

The first lookup of a tenant reads its row. From then on one small query every two seconds finds the rows that have
changed, regardless of the number of tenants. While PostgreSQL is unavailable, lookups return the last known state.
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

POLL_SECONDS = 2.0  # short enough for a suspension to take effect in every process within 5 s
SWEEP_SECONDS = 60.0  # `_CHANGES` does not find deleted rows, so all cached tenants are read again at this interval
UNKNOWN_SECONDS = 30.0  # how long an unknown slug is not looked up again, unless a row with it is created
UNKNOWN_LIMIT = 10_000

# Rows changed by transactions that the last poll could not see. Transaction ids are compared instead of times, because
# a change that commits late has an early `updated_at` and would be missed. Ids above the snapshot come from another
# database cluster (a restored dump) and are not changes.
_CHANGES = """
    SELECT pg_snapshot_xmin(snapshot)::text::bigint, tenant.tid, tenant.slug
    FROM pg_current_snapshot() AS snapshot
    LEFT JOIN tenants_tenant AS tenant
      ON tenant.changed >= %s AND tenant.changed < pg_snapshot_xmax(snapshot)::text::bigint
"""


class Issuer(msgspec.Struct, frozen=True):
    """A tenant's own token issuer, with its keys or the URL of its keys."""

    name: str
    jwks_url: str
    keys: dict[str, jwks.Key]
    producer_audience: str
    worker_audience: str


class CacheEntry(msgspec.Struct, frozen=True):
    """A cached tenant. `related` has the values of the registered loaders, by their name."""

    tenant: TenantSnapshot
    issuers: tuple[Issuer, ...]
    version: int
    related: dict[str, Any] = {}


# Returns another app's data of the tenants with these ids, as tid -> value. Tenants without data are left out.
Loader = Callable[[list[str]], dict[str, Any]]


class TenantCache:
    """The tenants that this process has looked up, by slug."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_slug: dict[str, CacheEntry] = {}
        self._slugs: dict[str, str] = {}  # tid -> slug
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._poller: threading.Thread | None = None
        self._stopped = threading.Event()
        self._since: int | None = None  # the oldest transaction that the last poll could not see
        self._swept_at = clock()
        self._loaders: dict[str, Loader] = {}

    def register_loader(self, name: str, loader: Loader) -> None:
        """Cache another app's data of every tenant under this name.

        A database trigger must change the tenant's row whenever the data changes, as the trigger of the issuers does.
        The data is read after the row, so it is never older than the row.
        """
        self._loaders[name] = loader

    def get_related(self, name: str, tenant: TenantSnapshot) -> Any:
        """Return the cached data of a registered loader for a tenant, or None. Costs a dict lookup."""
        entry = self._by_slug.get(tenant.slug)
        return None if entry is None or entry.tenant.tid != tenant.tid else entry.related.get(name)

    def get_cached(self, slug: str) -> TenantSnapshot | None:
        """Return the tenant if it is cached, else None. Costs a dict lookup."""
        entry = self._by_slug.get(slug)
        return None if entry is None else entry.tenant

    def find(self, slug: str) -> TenantSnapshot | None:
        """Return the tenant with this slug, or None.

        Reads the row if the tenant is not cached, so do not call it on an event loop. Raises Unavailable if
        PostgreSQL is needed and unavailable.
        """
        entry = self._find_entry(slug)
        return None if entry is None else entry.tenant

    def find_by_tid(self, tid: str) -> TenantSnapshot | None:
        """Return the tenant with this id, or None. Blocks and raises like `find`."""
        slug = self._slugs.get(tid)
        if slug is None:
            self._load([tid])
            slug = self._slugs.get(tid)
        return None if slug is None else self.find(slug)

    def find_issuer(self, slug: str, name: str) -> Issuer | None:
        """Return the tenant's issuer with this name, or None. Blocks and raises like `find`."""
        entry = self._find_entry(slug)
        for issuer in entry.issuers if entry is not None else ():
            if issuer.name == name:
                return issuer
        return None

    def _find_entry(self, slug: str) -> CacheEntry | None:
        self._start_poller()
        entry = self._by_slug.get(slug)
        if entry is not None:
            return entry
        unknown_until = self._unknown.get(slug)
        if unknown_until is not None and self._clock() < unknown_until:
            return None
        # No row can have such a slug, and PostgreSQL raises an error for NUL and lone surrogates.
        if len(slug) > 128 or not slug.isascii() or not slug.isprintable():
            return None
        try:
            entries = self._build_entries(_rows().filter(slug=slug))
        except Error as error:
            raise Unavailable(
                "Tenants cannot be read, because the database is unavailable.", retry_after_seconds=5
            ) from error
        self._store(entries)
        if not entries:
            with self._lock:
                self._unknown[slug] = self._clock() + UNKNOWN_SECONDS
                while len(self._unknown) > UNKNOWN_LIMIT:
                    self._unknown.popitem(last=False)
        return self._by_slug.get(slug)

    def refresh(self, tids: Iterable[str]) -> None:
        """Read these rows again now, after this process has changed them."""
        self._load(list(tids))

    def poll(self) -> None:
        """Read the tenants that have changed since the last poll. Raises django.db.Error."""
        with connection.cursor() as cursor:
            if self._since is None:
                # Rows loaded before the first poll may have changed since, so read all of them once.
                cursor.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
                row = cursor.fetchone()
                self._since = int(row[0])
                changed = list(self._slugs)
            else:
                cursor.execute(_CHANGES, [self._since])
                rows = cursor.fetchall()
                self._since = int(rows[0][0])
                # Load only tenants that this process has looked up; it does not need all of them.
                changed = [tid for _, tid, slug in rows if tid in self._slugs or slug in self._unknown]
        now = self._clock()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            changed = list({*changed, *self._slugs})
        if changed:
            self._load(changed)

    def stop(self) -> None:
        """Stop the background thread and empty the cache. The next lookup starts the thread again."""
        self._stopped.set()
        if self._poller is not None:
            self._poller.join(timeout=5)
        self.reset()

    def reset(self) -> None:
        """Empty the cache. A forked child calls this: it inherits the cache but not the thread."""
        self._lock = threading.Lock()
        self._by_slug, self._slugs, self._unknown = {}, {}, OrderedDict()
        self._poller, self._stopped = None, threading.Event()
        self._since, self._swept_at = None, self._clock()

    def _load(self, tids: list[str]) -> None:
        """Cache the rows with these ids, and remove the ids that have no row."""
        try:
            entries = self._build_entries(_rows().filter(tid__in=tids))
        except Error as error:
            raise Unavailable(
                "Tenants cannot be read, because the database is unavailable.", retry_after_seconds=5
            ) from error
        self._store(entries)
        deleted = set(tids) - {entry.tenant.tid for entry in entries}
        with self._lock:
            for tid in deleted:
                slug = self._slugs.pop(tid, None)
                if slug is not None:
                    self._by_slug.pop(slug, None)

    def _build_entries(self, rows: Iterable[models.Tenant]) -> list[CacheEntry]:
        rows = list(rows)
        if not rows:
            return []
        related = {name: loader([row.tid for row in rows]) for name, loader in self._loaders.items()}
        return [
            build_entry(row, {name: values[row.tid] for name, values in related.items() if row.tid in values})
            for row in rows
        ]

    def _store(self, entries: Iterable[CacheEntry]) -> None:
        for entry in entries:
            tid, slug = entry.tenant.tid, entry.tenant.slug
            with self._lock:
                former_slug = self._slugs.get(tid)
                former = None if former_slug is None else self._by_slug.get(former_slug)
                # Two threads may have read the row before and after a change. The older state must not replace the
                # newer one, even if it arrives later.
                if former is not None and former.version >= entry.version:
                    continue
                if former_slug is not None and former_slug != slug:
                    self._by_slug.pop(former_slug, None)
                self._by_slug[slug] = entry
                self._slugs[tid] = slug
                self._unknown.pop(slug, None)

    def _start_poller(self) -> None:
        if self._poller is not None:
            return
        with self._lock:
            if self._poller is None:
                self._poller = threading.Thread(
                    target=self._poll_until, args=[self._stopped], name="tenant-cache", daemon=True
                )
                self._poller.start()

    def _poll_until(self, stopped: threading.Event) -> None:
        is_down = False
        try:
            while not stopped.wait(POLL_SECONDS):
                try:
                    self.poll()
                    is_down = False
                except (Error, Unavailable) as error:
                    connection.close()  # the next poll opens a new connection
                    if not is_down:
                        log.warning("tenant changes cannot be read, using the last known state: %s", error)
                    is_down = True
        finally:
            connection.close()


def build_entry(row: models.Tenant, related: dict[str, Any]) -> CacheEntry:
    """Build the entry of a row. An empty limit becomes the installation's default."""
    queues, limits = conf().queues, conf().limits
    tenant = TenantSnapshot(
        tid=row.tid,
        slug=row.slug,
        is_suspended=row.is_suspended,
        payload_bytes=_or_default(row.payload_bytes, queues.payload_bytes),
        result_bytes=_or_default(row.result_bytes, queues.result_bytes),
        depth=_or_default(row.depth, limits.depth),
        rates=Rates(
            create=_or_default(row.create_per_second, limits.create_per_second),
            claim=_or_default(row.claim_per_second, limits.claim_per_second),
            admin=_or_default(row.admin_per_second, limits.admin_per_second),
            webhook=_or_default(row.webhook_per_second, limits.webhook_per_second),
        ),
        retention_ms=1000 * _or_default(row.retention_seconds, queues.retention_seconds),
        dead_retention_ms=1000 * _or_default(row.dead_retention_seconds, queues.dead_retention_seconds),
        is_idempotency_strict=_or_default(row.is_idempotency_strict, limits.idempotency_strict),
        is_lease_token_required=_or_default(row.is_lease_token_required, limits.lease_token_required),
    )
    issuers = tuple(
        Issuer(
            name=issuer.issuer,
            jwks_url=issuer.jwks_url,
            keys={} if issuer.jwks_url else jwks.parse_keys(issuer.jwks),
            producer_audience=issuer.producer_audience,
            worker_audience=issuer.worker_audience,
        )
        for issuer in row.issuers.all()
    )
    return CacheEntry(tenant, issuers, row.version, related)


def _rows() -> QuerySet[models.Tenant]:
    return models.Tenant.objects.prefetch_related("issuers")


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


tenant_cache = TenantCache()
os.register_at_fork(after_in_child=tenant_cache.reset)
