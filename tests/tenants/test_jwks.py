"""The cache of an issuer's keys during outages, key rotation and many requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from core.errors import CodeqError, Unauthenticated, Unavailable
from tenants import http_fetch
from tenants.auth import jwks
from tenants.auth.validators import JwksValidator
from tenants.auth.verifier import Verifier
from tests.tenants.bad_responses import BAD_RESPONSES
from tests.tenants.conftest import Clock, Configure, JwksServer, run_inline
from tests.tenants.minting import ISSUER, Signer
from tests.waiting import until, until_async

K1, K2 = jwks.Key("k1", "ES256", None), jwks.Key("k2", "ES256", None)
HOUR = 3600.0


class Source:
    """A key cache with a clock and responses that the test sets. Fetches in the test's thread."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.answer: dict[str, jwks.Key] | Exception = {"k1": K1}
        self.fetched = 0
        self.keys = jwks.KeyCache("the test's issuer", self.fetch, start=run_inline, clock=self.clock)

    def fetch(self) -> Mapping[str, jwks.Key]:
        self.fetched += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def find(self, kid: str) -> jwks.Key | None:
        """Wait for a fetch and look up again, like the verifier."""
        for _ in range(3):
            try:
                return self.keys.find(kid, "ES256")
            except jwks.KeysPending as pending:
                pending.fetch.result(1)
        raise AssertionError("still pending")


@pytest.fixture
def source() -> Source:
    return Source()


OUTAGE = pytest.mark.spec("AUT-1", "Cached keys are used for 24 h while their source is down or returns no usable key")
ROTATION = pytest.mark.spec(
    "AUT-1", "A new key is accepted within 5 s of its first token, and a withdrawn key is refused"
)
STAMPEDE = pytest.mark.spec("AUT-1", "Many clients and random kids cause only a few fetches")

FAILURES: dict[str, dict[str, jwks.Key] | Exception] = {
    "down": ConnectionRefusedError("refused"),
    "late": TimeoutError("timed out"),
    "garbled": http_fetch.FetchError("not JSON"),
    "empty": {},
}


@OUTAGE
@pytest.mark.parametrize("failure", FAILURES)
def test_keys_are_used_for_a_day_without_their_source(failure: str, source: Source) -> None:
    assert source.find("k1") is K1
    source.answer = FAILURES[failure]
    for _ in range(24 * 60 - 1):
        source.clock.now += 60
        assert source.find("k1") is K1
    source.clock.now += 61
    with pytest.raises(Unavailable):
        source.find("k1")
    source.answer = {"k1": K1}
    source.clock.now += 5
    assert source.find("k1") is K1


@OUTAGE
def test_unavailable_source_is_a_503_and_retried_soon(source: Source) -> None:
    source.answer = FAILURES["down"]
    for _ in range(20):
        with pytest.raises(Unavailable):
            source.find("k1")
    assert source.fetched == 1
    source.answer = {"k1": K1}
    source.clock.now += 5
    assert source.find("k1") is K1


@OUTAGE
def test_unknown_key_during_an_outage_is_not_a_503(source: Source) -> None:
    source.find("k1")
    source.answer = FAILURES["down"]
    source.clock.now += HOUR
    assert source.find("k2") is None


@ROTATION
def test_new_key_is_accepted_within_five_seconds_of_its_first_token(source: Source) -> None:
    source.find("k1")
    source.clock.now += 0.1
    source.answer = {"k1": K1, "k2": K2}
    first_token_at = source.clock.now
    while source.find("k2") is None:
        source.clock.now += 0.1
    assert source.clock.now - first_token_at <= 5
    assert source.fetched == 2


@ROTATION
def test_new_key_is_accepted_at_once_if_the_last_fetch_is_old_enough(source: Source) -> None:
    source.find("k1")
    source.clock.now += 30
    source.answer = {"k1": K1, "k2": K2}
    assert source.find("k2") is K2


@ROTATION
def test_withdrawn_key_is_refused_after_the_next_fetch(source: Source) -> None:
    source.find("k1")
    source.answer = {"k2": K2}
    source.clock.now += 59
    assert source.find("k1") is K1
    source.clock.now += 2
    source.find("k1")  # returns the old key, and starts a fetch
    assert source.find("k1") is None


@ROTATION
def test_withdrawn_key_is_refused_at_once_after_a_quiet_hour(source: Source) -> None:
    source.find("k1")
    source.answer = {"k2": K2}
    source.clock.now += HOUR
    assert source.find("k1") is None
    assert source.find("k2") is K2


@STAMPEDE
def test_random_kids_cause_at_most_one_fetch_per_thirty_seconds(source: Source) -> None:
    for step in range(60_000):
        source.clock.now = 1000 + step / 1000
        assert source.find(f"random-{step}") is None
        if step % 100 == 0:
            assert source.find("k1") is K1
    assert source.fetched <= 3  # the first fetch, and two in sixty seconds


@STAMPEDE
def test_unexpected_error_in_a_fetch_wakes_the_waiters() -> None:
    def fetch() -> Mapping[str, jwks.Key]:
        raise ZeroDivisionError

    def start(job: Callable[[], None]) -> None:
        with pytest.raises(ZeroDivisionError):
            job()

    keys = jwks.KeyCache("broken", fetch, start=start)
    with pytest.raises(jwks.KeysPending) as pending:
        keys.find("k1", "ES256")
    assert pending.value.fetch.done()
    with pytest.raises(Unavailable):
        keys.find("k1", "ES256")


@STAMPEDE
def test_fetch_ends_if_no_thread_can_be_started() -> None:
    def start(job: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    keys = jwks.KeyCache("no threads", dict, start=start)
    with pytest.raises(jwks.KeysPending) as pending:
        keys.find("k1", "ES256")
    assert pending.value.fetch.done()


# -- over HTTP ------------------------------------------------------------------------------------------------------


def create_key_cache(server: JwksServer, clock: Clock) -> jwks.KeyCache:
    return jwks.KeyCache(server.url, lambda: jwks.parse_keys(http_fetch.fetch_json(server.url)), clock=clock)


def create_verifier(server: JwksServer, clock: Clock) -> Verifier:
    return Verifier([JwksValidator(create_key_cache(server, clock))])


@OUTAGE
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("kind", BAD_RESPONSES)
def test_tokens_are_verified_while_the_issuer_returns_garbage(kind: str, issuer: JwksServer, signer: Signer) -> None:
    clock = Clock(0)
    keys = create_key_cache(issuer, clock)
    verifier = Verifier([JwksValidator(keys)])
    verifier.verify(signer.token(jti="before"))
    issuer.respond = BAD_RESPONSES[kind](issuer)
    for hours in (1, 12, 23.9):
        clock.now, requests_before = hours * HOUR, issuer.requests
        verifier.verify(signer.token(jti=f"after {hours} h"))
        until(lambda before=requests_before: issuer.requests > before and not keys.is_fetching)
    with pytest.raises(Unauthenticated):
        verifier.verify(Signer("ES256", "unknown").token())


@OUTAGE
@pytest.mark.usefixtures("acme")
def test_cold_start_without_the_issuer_is_a_503_with_retry_after(issuer: JwksServer, signer: Signer) -> None:
    issuer.respond = BAD_RESPONSES["500"](issuer)
    with pytest.raises(Unavailable) as refusal:
        Verifier().verify(signer.token())
    assert refusal.value.retry_after_seconds


@ROTATION
@pytest.mark.usefixtures("acme")
def test_rotation_over_http(issuer: JwksServer) -> None:
    clock = Clock(0)
    verifier = create_verifier(issuer, clock)
    old, new = Signer("ES256", "old"), Signer("EdDSA", "new")
    issuer.keys = [old.jwk]
    verifier.verify(old.token())
    issuer.keys = [old.jwk, new.jwk]
    clock.now = 5
    verifier.verify(new.token())
    verifier.verify(old.token(jti="2"))
    issuer.keys = [new.jwk]
    clock.now += 301
    with pytest.raises(Unauthenticated):
        verifier.verify(old.token(jti="3"))


@STAMPEDE
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
def test_two_hundred_threads_at_a_cold_start_fetch_once(issuer: JwksServer, signer: Signer) -> None:
    verifier = Verifier()
    given = [signer.token(jti=str(number)) for number in range(200)]
    barrier = threading.Barrier(200, timeout=30)

    def verify(token: str) -> str:
        barrier.wait()
        try:
            return verifier.verify(token).tenant.slug
        finally:
            connections.close_all()

    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(verify, given)) == ["acme"] * 200
    assert issuer.requests == 1


@STAMPEDE
@pytest.mark.usefixtures("acme")
def test_two_hundred_threads_with_random_kids_fetch_twice(issuer: JwksServer, signer: Signer) -> None:
    verifier = Verifier()
    verifier.verify(signer.token())
    forged = Signer("ES256", "forged")
    forgeries = [forged.sign_raw({"alg": "ES256", "kid": f"random-{n}"}, {"iss": ISSUER}) for n in range(200)]

    def refused(token: str) -> bool:
        try:
            verifier.verify(token)
        except Unauthenticated:
            return True
        return False

    with ThreadPoolExecutor(200) as pool:
        assert all(pool.map(refused, forgeries))
    assert issuer.requests <= 2


@STAMPEDE
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_tokens_of_cached_keys_do_not_wait_for_a_slow_fetch(
    issuer: JwksServer, signer: Signer, configure: Configure
) -> None:
    clock = Clock(0)
    verifier = create_verifier(issuer, clock)
    await verifier.verify_async(signer.token())
    issuer.respond, requests_before = issuer.hang, issuer.requests
    clock.now = 10
    unknown = [Signer("ES256", f"random-{n}").token() for n in range(50)]
    waiting = [asyncio.ensure_future(verifier.verify_async(token)) for token in unknown]

    async def is_requested() -> bool:
        return issuer.requests > requests_before

    await until_async(is_requested)
    # More tokens of unknown keys wait than there are threads.
    caller = await asyncio.wait_for(verifier.verify_async(signer.token(sub="known")), 2)
    assert caller.subject == "known"
    assert not any(task.done() for task in waiting)
    issuer.release.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unauthenticated}
    assert issuer.requests == requests_before + 1
    await asyncio.to_thread(verifier.stop)


@OUTAGE
@pytest.mark.real_time
@pytest.mark.usefixtures("acme")
def test_wait_for_a_fetch_is_bounded(issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenants.auth.verifier._FETCH_WAIT_SECONDS", 0.2)
    issuer.respond = issuer.hang
    with pytest.raises(CodeqError) as refusal:
        Verifier().verify(signer.token())
    assert isinstance(refusal.value, Unavailable)


@OUTAGE
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_cancelled_wait_for_keys_does_not_affect_other_requests(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, issuer.respond = Verifier(), issuer.hang
    monkeypatch.setattr("tenants.auth.verifier._FETCH_WAIT_SECONDS", 0.05)
    with pytest.raises(Unavailable):
        await verifier.verify_async(signer.token(jti="impatient"))
    monkeypatch.undo()
    cancelled = asyncio.ensure_future(verifier.verify_async(signer.token(jti="cancelled")))
    waiting = asyncio.ensure_future(verifier.verify_async(signer.token(jti="waiting")))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    issuer.release.set()
    assert (await asyncio.wait_for(waiting, 5)).tenant.slug == "acme"
    assert issuer.requests == 1
    await asyncio.to_thread(verifier.stop)
