"""The snapshot of the tenants: no query for what is known, nothing that is missed, nothing lost with PostgreSQL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from core.errors import Unavailable
from tenants import cache as directories
from tenants import models, services
from tenants.cache import TenantCache
from tests.factories import TenantIssuerFactory
from tests.tenants.conftest import Clock, Configure
from tests.tenants.minting import Signer
from tests.waiting import until

Queries = Callable[..., Any]
FOLLOWED = pytest.mark.spec("TEN-5", "A change of a tenant is followed by every process, whoever made it and however")
SNAPSHOT = pytest.mark.spec("TEN-4", "A known tenant costs no query, and following all of them costs one")


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def directory(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[TenantCache]:
    """Another process's directory, whose `poll` the test calls itself."""
    one = TenantCache(clock)
    monkeypatch.setattr(one, "_follow", lambda: None)
    yield one
    one.stop()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """PostgreSQL cannot be reached from here on: the address leads nowhere."""
    host = connection.settings_dict["HOST"]

    def change(is_broken: bool) -> None:
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "HOST", "/nowhere/at/all" if is_broken else host)

    return change


# -- lookups --------------------------------------------------------------------------------------------------------


@SNAPSHOT
def test_a_known_tenant_costs_no_query(
    acme: models.Tenant, directory: TenantCache, django_assert_num_queries: Queries
) -> None:
    with django_assert_num_queries(2):  # the row and its issuers
        directory.find("acme")
    with django_assert_num_queries(0):
        assert directory.find("acme") is directory.known("acme")
        assert directory.find_tid(acme.tid) is directory.known("acme")
        assert directory.issuer("acme", "nobody") is None


@SNAPSHOT
def test_an_unknown_name_is_looked_up_once_in_a_while(
    acme: models.Tenant, directory: TenantCache, clock: Clock, django_assert_num_queries: Queries
) -> None:
    assert directory.find("nobody") is None
    with django_assert_num_queries(0):
        assert directory.find("nobody") is None
    clock.now = directories.UNKNOWN_SECONDS
    with django_assert_num_queries(1):
        assert directory.find("nobody") is None


@SNAPSHOT
def test_unknown_names_are_not_remembered_without_bound(
    db: None, directory: TenantCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "UNKNOWN_LIMIT", 10)
    for number in range(50):
        assert directory.find(f"nobody-{number}") is None
    assert len(directory._unknown) == 10


@pytest.mark.spec("TEN-2", "What cannot be a tenant's name is not even looked up")
@pytest.mark.parametrize("name", ["\x00", "a\x00b", "ü", "\udcff", "x" * 129, "a\nb"], ids=ascii)
def test_what_cannot_be_a_name_is_no_query(
    name: str, db: None, directory: TenantCache, django_assert_num_queries: Queries
) -> None:
    with django_assert_num_queries(0):
        assert directory.find(name) is None


@pytest.mark.spec("TEN-5", "A tenant's limits are its own, or the installation's where it has none")
def test_limits_are_the_rows_or_the_installations(db: None, directory: TenantCache, configure: Configure) -> None:
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
    plain, own = directory.find("plain"), directory.find("own")
    assert plain is not None
    assert own is not None
    assert (plain.payload_bytes, plain.rates.create, plain.is_idempotency_strict) == (1000, 50, True)
    assert (own.payload_bytes, own.result_bytes, own.depth) == (10, 20, 30)
    assert (own.rates.create, own.rates.claim, own.rates.admin, own.rates.webhook) == (0, 1.5, 2, 3)
    assert (own.retention_ms, own.dead_retention_ms) == (60_000, 120_000)
    assert (own.is_idempotency_strict, own.is_lease_token_required) == (False, True)


# -- following ------------------------------------------------------------------------------------------------------


def suspend_by_service() -> None:
    services.suspend("acme")


def suspend_by_queryset() -> None:
    models.Tenant.objects.filter(slug="acme").update(status="suspended")


def suspend_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tenants_tenant SET status = 'suspended' WHERE slug = 'acme'")


@FOLLOWED
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("suspend", [suspend_by_service, suspend_by_queryset, suspend_by_hand])
@pytest.mark.parametrize("looks_before", [0, 1, 2])
def test_a_suspension_is_seen_at_the_next_look(
    suspend: Callable[[], None], looks_before: int, acme: models.Tenant, directory: TenantCache
) -> None:
    tenant = directory.find("acme")
    assert tenant is not None
    assert not tenant.suspended
    for _ in range(looks_before):
        directory.poll()
        assert directory.known("acme") is tenant
    suspend()
    directory.poll()
    now = directory.known("acme")
    assert now is not None
    assert now.suspended


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_change_that_commits_late_is_not_missed(
    acme: models.Tenant, other: models.Tenant, directory: TenantCache
) -> None:
    directory.find("acme")
    directory.find("other")
    directory.poll()
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
    directory.poll()
    seen = models.Tenant.objects.get(slug="other").updated_at
    may_commit.set()
    slow.join(10)
    # This is what a watermark by time would be caught by: the later commit bears the earlier time.
    assert models.Tenant.objects.get(slug="acme").updated_at < seen
    directory.poll()
    tenant = directory.known("acme")
    assert tenant is not None
    assert tenant.suspended


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_row_read_before_a_change_does_not_bring_the_old_state_back(
    acme: models.Tenant, directory: TenantCache
) -> None:
    directory.find("acme")
    slow_reader = list(models.Tenant.objects.prefetch_related("issuers").filter(slug="acme"))
    services.suspend("acme")
    directory.poll()
    directory._keep(directory._entries(slow_reader))
    tenant = directory.known("acme")
    assert tenant is not None
    assert tenant.suspended


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_tenant_made_elsewhere_ends_the_memory_of_its_absence(directory: TenantCache) -> None:
    assert directory.find("late") is None
    directory.poll()
    assert directory.find("late") is None
    services.create_tenant("late")
    directory.poll()
    assert directory.find("late") is not None


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_renamed_tenant_loses_its_former_name(acme: models.Tenant, directory: TenantCache) -> None:
    directory.find("acme")
    directory.poll()
    models.Tenant.objects.filter(slug="acme").update(slug="acme-corp")
    directory.poll()
    assert directory.known("acme") is None
    renamed = directory.known("acme-corp")
    assert renamed is not None
    assert renamed.tid == acme.tid


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_deleted_tenant_is_gone_within_a_minute(
    acme: models.Tenant, other: models.Tenant, directory: TenantCache, clock: Clock
) -> None:
    directory.find("acme")
    directory.find("other")
    directory.poll()
    acme.delete()
    clock.now = directories.SWEEP_SECONDS
    directory.poll()
    assert directory.known("acme") is None
    assert directory.known("other") is not None
    assert directory.find_tid("aaaaaaaa") is None


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_issuers_are_followed_with_their_tenant(acme: models.Tenant, directory: TenantCache, signer: Signer) -> None:
    directory.find("acme")
    directory.poll()
    row = TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks={"keys": [signer.jwk]})
    directory.poll()
    issuer = directory.issuer("acme", "acme-idp")
    assert issuer is not None
    assert set(issuer.keys) == {signer.kid}
    models.TenantIssuer.objects.filter(pk=row.pk).update(jwks={"keys": []})
    directory.poll()
    issuer = directory.issuer("acme", "acme-idp")
    assert issuer is not None
    assert issuer.keys == {}
    row.delete()
    directory.poll()
    assert directory.issuer("acme", "acme-idp") is None


@FOLLOWED
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
def test_a_suspension_is_in_force_within_five_seconds(acme: models.Tenant) -> None:
    directory = TenantCache()
    try:
        assert directory.find("acme") is not None
        models.Tenant.objects.filter(slug="acme").update(status="suspended")
        until(lambda: (tenant := directory.known("acme")) and tenant.suspended, 5)
    finally:
        directory.stop()


@SNAPSHOT
@pytest.mark.django_db(transaction=True)
def test_following_ten_thousand_tenants_is_one_indexed_query(
    directory: TenantCache, django_assert_num_queries: Queries
) -> None:
    models.Tenant.objects.bulk_create([models.Tenant(slug=f"t{number}") for number in range(10_000)])
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE tenants_tenant")
    for number in range(100):
        directory.find(f"t{number}")
    directory.poll()
    held = dict(directory._by_slug)
    with django_assert_num_queries(1):
        directory.poll()
    services.suspend("t99")
    services.suspend("t5000")  # not asked for here: not read either
    with django_assert_num_queries(3):  # the look, the row, its issuers
        directory.poll()
    assert {slug for slug, entry in directory._by_slug.items() if entry is not held[slug]} == {"t99"}
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {directories._CHANGES}", [directory._since])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan on tenants_tenant" not in plan


# -- trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("TEN-5", "While PostgreSQL is down the tenants last known are served")
@pytest.mark.django_db(transaction=True)
def test_without_postgresql_the_known_are_served_and_the_unknown_are_a_503(
    acme: models.Tenant, directory: TenantCache, broken: Callable[[bool], None], clock: Clock
) -> None:
    tenant = directory.find("acme")
    broken(True)
    with pytest.raises(Exception, match="nowhere"):
        directory.poll()
    clock.now = 3600
    assert directory.find("acme") is tenant
    with pytest.raises(Unavailable):
        directory.find("other")
    broken(False)
    services.suspend("acme")
    services.create_tenant("other")
    directory.poll()
    assert directory.find("other") is not None
    assert directory.find("acme") is not tenant


@FOLLOWED
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
def test_the_follower_outlives_an_outage(
    acme: models.Tenant,
    broken: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(directories, "POLL_SECONDS", 0.05)
    directory = TenantCache()
    try:
        directory.find("acme")
        until(lambda: directory._since is not None)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = "
                "current_database()"
            )
        broken(True)
        until(lambda: "cannot be followed" in caplog.text)
        broken(False)
        models.Tenant.objects.filter(slug="acme").update(status="suspended")
        until(lambda: (tenant := directory.known("acme")) and tenant.suspended)
        assert caplog.text.count("cannot be followed") < 5  # said, and not every two seconds
    finally:
        directory.stop()


@FOLLOWED
@pytest.mark.django_db(transaction=True)
def test_a_forked_child_follows_for_itself(acme: models.Tenant) -> None:
    directory = directories.tenant_cache
    directory.find("acme")
    assert directory._follower is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"fresh" if directory._follower is None and directory.known("acme") is None else b"stale")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"fresh"
    os.close(read)
    os.close(write)
