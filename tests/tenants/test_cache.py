"""The cache of tenants: queries, changes of rows, and outages of PostgreSQL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from core.errors import Unavailable
from tenants import cache as tenants_cache
from tenants import models, services
from tenants.cache import TenantCache
from tests.factories import TenantIssuerFactory
from tests.tenants.conftest import Clock, Configure
from tests.tenants.minting import Signer
from tests.waiting import until

Queries = Callable[..., Any]
POLLED = pytest.mark.spec("TEN-5", "Every process notices every change of a tenant, including changes in SQL")
CACHED = pytest.mark.spec("TEN-4", "A cached tenant costs no query, and a poll of all tenants costs one")


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def cache(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[TenantCache]:
    """The cache of another process. The test calls its `poll`."""
    cache = TenantCache(clock)
    monkeypatch.setattr(cache, "_start_poller", lambda: None)
    yield cache
    cache.stop()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`broken(True)` makes PostgreSQL unreachable from this process."""
    host = connection.settings_dict["HOST"]

    def change(is_broken: bool) -> None:
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "HOST", "/nowhere/at/all" if is_broken else host)

    return change


# -- lookups --------------------------------------------------------------------------------------------------------


@CACHED
def test_cached_tenant_costs_no_query(
    acme: models.Tenant, cache: TenantCache, django_assert_num_queries: Queries
) -> None:
    with django_assert_num_queries(2):  # the row and its issuers
        cache.find("acme")
    with django_assert_num_queries(0):
        assert cache.find("acme") is cache.get_cached("acme")
        assert cache.find_by_tid(acme.tid) is cache.get_cached("acme")
        assert cache.find_issuer("acme", "nobody") is None


@CACHED
def test_unknown_name_is_looked_up_at_intervals(
    acme: models.Tenant, cache: TenantCache, clock: Clock, django_assert_num_queries: Queries
) -> None:
    assert cache.find("nobody") is None
    with django_assert_num_queries(0):
        assert cache.find("nobody") is None
    clock.now = tenants_cache.UNKNOWN_SECONDS
    with django_assert_num_queries(1):
        assert cache.find("nobody") is None


@CACHED
def test_number_of_cached_unknown_names_is_limited(
    db: None, cache: TenantCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants_cache, "UNKNOWN_LIMIT", 10)
    for number in range(50):
        assert cache.find(f"nobody-{number}") is None
    assert len(cache._unknown) == 10


@pytest.mark.spec("TEN-2", "An invalid tenant name is not looked up")
@pytest.mark.parametrize("name", ["\x00", "a\x00b", "ü", "\udcff", "x" * 129, "a\nb"], ids=ascii)
def test_invalid_name_costs_no_query(
    name: str, db: None, cache: TenantCache, django_assert_num_queries: Queries
) -> None:
    with django_assert_num_queries(0):
        assert cache.find(name) is None


@pytest.mark.spec("TEN-5", "An empty limit of a tenant is the installation's default")
def test_empty_limits_are_the_installations_defaults(db: None, cache: TenantCache, configure: Configure) -> None:
    configure(limits={"create_per_second": 50, "idempotency_strict": True}, queues={"payload_bytes": 1000})
    services.create_tenant("plain")
    services.create_tenant(
        "own",
        payload_bytes=10,
        result_bytes=20,
        depth=30,
        create_per_second=0,
        claim_per_second=1.5,
        admin_per_second=2,
        webhook_per_second=3,
        retention_seconds=60,
        dead_retention_seconds=120,
        is_idempotency_strict=False,
        is_lease_token_required=True,
    )
    plain, own = cache.find("plain"), cache.find("own")
    assert plain is not None
    assert own is not None
    assert (plain.payload_bytes, plain.rates.create, plain.is_idempotency_strict) == (1000, 50, True)
    assert (own.payload_bytes, own.result_bytes, own.depth) == (10, 20, 30)
    assert (own.rates.create, own.rates.claim, own.rates.admin, own.rates.webhook) == (0, 1.5, 2, 3)
    assert (own.retention_ms, own.dead_retention_ms) == (60_000, 120_000)
    assert (own.is_idempotency_strict, own.is_lease_token_required) == (False, True)


# -- polling ---------------------------------------------------------------------------------------------------------


def suspend_by_service() -> None:
    services.suspend("acme")


def suspend_by_queryset() -> None:
    models.Tenant.objects.filter(slug="acme").update(status="suspended")


def suspend_by_sql() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tenants_tenant SET status = 'suspended' WHERE slug = 'acme'")


@POLLED
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("suspend", [suspend_by_service, suspend_by_queryset, suspend_by_sql])
@pytest.mark.parametrize("polls_before", [0, 1, 2])
def test_poll_notices_a_suspension(
    suspend: Callable[[], None], polls_before: int, acme: models.Tenant, cache: TenantCache
) -> None:
    tenant = cache.find("acme")
    assert tenant is not None
    assert not tenant.is_suspended
    for _ in range(polls_before):
        cache.poll()
        assert cache.get_cached("acme") is tenant
    suspend()
    cache.poll()
    now = cache.get_cached("acme")
    assert now is not None
    assert now.is_suspended


@POLLED
@pytest.mark.django_db(transaction=True)
def test_poll_notices_a_change_that_commits_late(acme: models.Tenant, other: models.Tenant, cache: TenantCache) -> None:
    cache.find("acme")
    cache.find("other")
    cache.poll()
    changed, may_commit = threading.Event(), threading.Event()

    def change_slowly() -> None:
        try:
            with transaction.atomic():
                models.Tenant.objects.get(slug="acme").save()
                services._set_status("acme", models.Tenant.Status.SUSPENDED)
                changed.set()
                assert may_commit.wait(10)
        finally:
            connection.close()

    slow = threading.Thread(target=change_slowly)
    slow.start()
    assert changed.wait(10)
    services.suspend("other")
    cache.poll()
    seen_at = models.Tenant.objects.get(slug="other").updated_at
    may_commit.set()
    slow.join(10)
    # A watermark by time would miss this change: it commits later, with an earlier time.
    assert models.Tenant.objects.get(slug="acme").updated_at < seen_at
    cache.poll()
    tenant = cache.get_cached("acme")
    assert tenant is not None
    assert tenant.is_suspended


@POLLED
@pytest.mark.django_db(transaction=True)
def test_older_state_does_not_replace_the_newer_one(acme: models.Tenant, cache: TenantCache) -> None:
    cache.find("acme")
    older_rows = list(models.Tenant.objects.prefetch_related("issuers").filter(slug="acme"))
    services.suspend("acme")
    cache.poll()
    cache._store(cache._build_entries(older_rows))
    tenant = cache.get_cached("acme")
    assert tenant is not None
    assert tenant.is_suspended


@POLLED
@pytest.mark.django_db(transaction=True)
def test_poll_notices_a_tenant_that_was_unknown(cache: TenantCache) -> None:
    assert cache.find("late") is None
    cache.poll()
    assert cache.find("late") is None
    services.create_tenant("late")
    cache.poll()
    assert cache.find("late") is not None


@POLLED
@pytest.mark.django_db(transaction=True)
def test_renamed_tenant_is_not_found_by_its_old_name(acme: models.Tenant, cache: TenantCache) -> None:
    cache.find("acme")
    cache.poll()
    models.Tenant.objects.filter(slug="acme").update(slug="acme-corp")
    cache.poll()
    assert cache.get_cached("acme") is None
    renamed = cache.get_cached("acme-corp")
    assert renamed is not None
    assert renamed.tid == acme.tid


@POLLED
@pytest.mark.django_db(transaction=True)
def test_deleted_tenant_is_removed_within_a_minute(
    acme: models.Tenant, other: models.Tenant, cache: TenantCache, clock: Clock
) -> None:
    cache.find("acme")
    cache.find("other")
    cache.poll()
    acme.delete()
    clock.now = tenants_cache.SWEEP_SECONDS
    cache.poll()
    assert cache.get_cached("acme") is None
    assert cache.get_cached("other") is not None
    assert cache.find_by_tid("aaaaaaaa") is None


@POLLED
@pytest.mark.django_db(transaction=True)
def test_poll_notices_changes_of_issuers(acme: models.Tenant, cache: TenantCache, signer: Signer) -> None:
    cache.find("acme")
    cache.poll()
    row = TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks={"keys": [signer.jwk]})
    cache.poll()
    issuer = cache.find_issuer("acme", "acme-idp")
    assert issuer is not None
    assert set(issuer.keys) == {signer.kid}
    models.TenantIssuer.objects.filter(pk=row.pk).update(jwks={"keys": []})
    cache.poll()
    issuer = cache.find_issuer("acme", "acme-idp")
    assert issuer is not None
    assert issuer.keys == {}
    row.delete()
    cache.poll()
    assert cache.find_issuer("acme", "acme-idp") is None


@POLLED
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
def test_suspension_takes_effect_within_five_seconds(acme: models.Tenant) -> None:
    cache = TenantCache()
    try:
        assert cache.find("acme") is not None
        models.Tenant.objects.filter(slug="acme").update(status="suspended")
        until(lambda: (tenant := cache.get_cached("acme")) and tenant.is_suspended, 5)
    finally:
        cache.stop()


@CACHED
@pytest.mark.django_db(transaction=True)
def test_poll_of_ten_thousand_tenants_is_one_indexed_query(
    cache: TenantCache, django_assert_num_queries: Queries
) -> None:
    models.Tenant.objects.bulk_create([models.Tenant(slug=f"t{number}") for number in range(10_000)])
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE tenants_tenant")
    for number in range(100):
        cache.find(f"t{number}")
    cache.poll()
    entries_before = dict(cache._by_slug)
    with django_assert_num_queries(1):
        cache.poll()
    services.suspend("t99")
    services.suspend("t5000")  # never looked up, so not read
    with django_assert_num_queries(3):  # the poll, the row, its issuers
        cache.poll()
    assert {slug for slug, entry in cache._by_slug.items() if entry is not entries_before[slug]} == {"t99"}
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {tenants_cache._CHANGES}", [cache._since])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan on tenants_tenant" not in plan


# -- outages ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("TEN-5", "While PostgreSQL is down, cached tenants are used")
@pytest.mark.django_db(transaction=True)
def test_without_postgresql_cached_tenants_are_found_and_others_are_a_503(
    acme: models.Tenant, cache: TenantCache, broken: Callable[[bool], None], clock: Clock
) -> None:
    tenant = cache.find("acme")
    broken(True)
    with pytest.raises(Exception, match="nowhere"):
        cache.poll()
    clock.now = 3600
    assert cache.find("acme") is tenant
    with pytest.raises(Unavailable):
        cache.find("other")
    broken(False)
    services.suspend("acme")
    services.create_tenant("other")
    cache.poll()
    assert cache.find("other") is not None
    assert cache.find("acme") is not tenant


@POLLED
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
def test_polling_continues_after_an_outage(
    acme: models.Tenant,
    broken: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tenants_cache, "POLL_SECONDS", 0.05)
    cache = TenantCache()
    try:
        cache.find("acme")
        until(lambda: cache._since is not None)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = "
                "current_database()"
            )
        broken(True)
        until(lambda: "changes cannot be read" in caplog.text)
        broken(False)
        models.Tenant.objects.filter(slug="acme").update(status="suspended")
        until(lambda: (tenant := cache.get_cached("acme")) and tenant.is_suspended)
        assert caplog.text.count("changes cannot be read") < 5  # not logged at every poll
    finally:
        cache.stop()


@POLLED
@pytest.mark.django_db(transaction=True)
def test_forked_child_polls_for_itself(acme: models.Tenant) -> None:
    cache = tenants_cache.tenant_cache
    cache.find("acme")
    assert cache._poller is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"fresh" if cache._poller is None and cache.get_cached("acme") is None else b"stale")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"fresh"
    os.close(read)
    os.close(write)


def test_former_module_name_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="tenants.cache"):
        from tenants.directory import directory
    assert directory is tenants_cache.tenant_cache
