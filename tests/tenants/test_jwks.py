"""The keys of an issuer through outage, rotation and stampede."""

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
from tests.tenants.conftest import Clock, Configure, JwksServer
from tests.tenants.minting import ISSUER, Signer
from tests.waiting import until, until_async

K1, K2 = jwks.Key("k1", "ES256", None), jwks.Key("k2", "ES256", None)
HOUR = 3600.0


class Source:
    """A key set whose clock and answers the test sets, fetched in the test's own thread."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.answer: dict[str, jwks.Key] | Exception = {"k1": K1}
        self.fetched = 0
        self.keys = jwks.KeySet("the test's issuer", self.fetch, start=jwks.at_once, clock=self.clock)

    def fetch(self) -> Mapping[str, jwks.Key]:
        self.fetched += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def find(self, kid: str) -> jwks.Key | None:
        """As the verifier does it: wait, and ask again."""
        for _ in range(3):
            try:
                return self.keys.find(kid, "ES256")
            except jwks.Pending as pending:
                pending.flight.result(1)
        raise AssertionError("still pending")


@pytest.fixture
def source() -> Source:
    return Source()


OUTAGE = pytest.mark.spec("AUT-1", "Cached keys serve for 24 h while their source is down, empty or garbled")
ROTATION = pytest.mark.spec("AUT-1", "A new key is accepted within 5 s of first sight, a withdrawn one ends")
STAMPEDE = pytest.mark.spec("AUT-1", "No crowd and no random kid makes more than a few fetches")

FAILURES: dict[str, dict[str, jwks.Key] | Exception] = {
    "down": ConnectionRefusedError("refused"),
    "late": TimeoutError("timed out"),
    "garbled": http_fetch.FetchError("not JSON"),
    "empty": {},
}


@OUTAGE
@pytest.mark.parametrize("failure", FAILURES)
def test_keys_serve_a_day_without_their_source(failure: str, source: Source) -> None:
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
def test_a_source_that_never_answered_is_a_503_and_asked_again_soon(source: Source) -> None:
    source.answer = FAILURES["down"]
    for _ in range(20):
        with pytest.raises(Unavailable):
            source.find("k1")
    assert source.fetched == 1
    source.answer = {"k1": K1}
    source.clock.now += 5
    assert source.find("k1") is K1


@OUTAGE
def test_an_unknown_key_during_an_outage_is_unknown_and_no_503(source: Source) -> None:
    source.find("k1")
    source.answer = FAILURES["down"]
    source.clock.now += HOUR
    assert source.find("k2") is None


@ROTATION
def test_a_new_key_is_known_within_five_seconds_of_first_sight(source: Source) -> None:
    source.find("k1")
    source.clock.now += 0.1
    source.answer = {"k1": K1, "k2": K2}
    first_sight = source.clock.now
    while source.find("k2") is None:
        source.clock.now += 0.1
    assert source.clock.now - first_sight <= 5
    assert source.fetched == 2


@ROTATION
def test_a_new_key_is_known_at_once_when_the_set_is_not_brand_new(source: Source) -> None:
    source.find("k1")
    source.clock.now += 30
    source.answer = {"k1": K1, "k2": K2}
    assert source.find("k2") is K2


@ROTATION
def test_a_withdrawn_key_ends_with_the_next_fetch(source: Source) -> None:
    source.find("k1")
    source.answer = {"k2": K2}
    source.clock.now += 59
    assert source.find("k1") is K1
    source.clock.now += 2
    source.find("k1")  # answered from the old set, which this question has renewed
    assert source.find("k1") is None


@ROTATION
def test_after_a_quiet_hour_a_withdrawn_key_is_not_good_even_once(source: Source) -> None:
    source.find("k1")
    source.answer = {"k2": K2}
    source.clock.now += HOUR
    assert source.find("k1") is None
    assert source.find("k2") is K2


@STAMPEDE
def test_random_kids_cause_a_fetch_every_thirty_seconds_at_most(source: Source) -> None:
    for step in range(60_000):
        source.clock.now = 1000 + step / 1000
        assert source.find(f"random-{step}") is None
        if step % 100 == 0:
            assert source.find("k1") is K1
    assert source.fetched <= 3  # the first look, and two in sixty seconds


@STAMPEDE
def test_a_fetch_that_breaks_unforeseen_wakes_whoever_waits() -> None:
    def fetch() -> Mapping[str, jwks.Key]:
        raise ZeroDivisionError

    def start(job: Callable[[], None]) -> None:
        with pytest.raises(ZeroDivisionError):
            job()

    keys = jwks.KeySet("broken", fetch, start=start)
    with pytest.raises(jwks.Pending) as pending:
        keys.find("k1", "ES256")
    assert pending.value.flight.done()
    with pytest.raises(Unavailable):
        keys.find("k1", "ES256")


@STAMPEDE
def test_where_no_thread_can_be_started_nobody_waits_for_one() -> None:
    def start(job: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    keys = jwks.KeySet("no threads", dict, start=start)
    with pytest.raises(jwks.Pending) as pending:
        keys.find("k1", "ES256")
    assert pending.value.flight.done()


# -- over HTTP ------------------------------------------------------------------------------------------------------


def keys_at(server: JwksServer, clock: Clock) -> jwks.KeySet:
    return jwks.KeySet(server.url, lambda: jwks.keys_of(http_fetch.fetch_json(server.url)), clock=clock)


def verifier_at(server: JwksServer, clock: Clock) -> Verifier:
    return Verifier([JwksValidator(keys_at(server, clock))])


@OUTAGE
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("kind", BAD_RESPONSES)
def test_tokens_are_verified_while_the_issuer_answers_nonsense(kind: str, issuer: JwksServer, signer: Signer) -> None:
    clock = Clock(0)
    keys = keys_at(issuer, clock)
    verifier = Verifier([JwksValidator(keys)])
    verifier.verify(signer.token(jti="before"))
    issuer.answer = BAD_RESPONSES[kind](issuer)
    for hours in (1, 12, 23.9):
        clock.now, asked = hours * HOUR, issuer.asked
        verifier.verify(signer.token(jti=f"after {hours} h"))
        until(lambda asked=asked: issuer.asked > asked and not keys.is_fetching)
    with pytest.raises(Unauthenticated):
        verifier.verify(Signer("ES256", "unknown").token())


@OUTAGE
@pytest.mark.usefixtures("acme")
def test_a_cold_start_without_the_issuer_is_a_503_with_retry_after(issuer: JwksServer, signer: Signer) -> None:
    issuer.answer = BAD_RESPONSES["500"](issuer)
    with pytest.raises(Unavailable) as refusal:
        Verifier().verify(signer.token())
    assert refusal.value.retry_after_seconds


@ROTATION
@pytest.mark.usefixtures("acme")
def test_rotation_over_http(issuer: JwksServer) -> None:
    clock = Clock(0)
    verifier = verifier_at(issuer, clock)
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
    assert issuer.asked == 1


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
    assert issuer.asked <= 2


@STAMPEDE
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_tokens_of_known_keys_do_not_wait_for_keys_that_come_slowly(
    issuer: JwksServer, signer: Signer, configure: Configure
) -> None:
    clock = Clock(0)
    verifier = verifier_at(issuer, clock)
    await verifier.verify_async(signer.token())
    issuer.answer, asked = issuer.hang, issuer.asked
    clock.now = 10
    unknown = [Signer("ES256", f"random-{n}").token() for n in range(50)]
    waiting = [asyncio.ensure_future(verifier.verify_async(token)) for token in unknown]

    async def is_asked() -> bool:
        return issuer.asked > asked

    await until_async(is_asked)
    # More unknown tokens wait than there are threads, and yet:
    caller = await asyncio.wait_for(verifier.verify_async(signer.token(sub="known")), 2)
    assert caller.subject == "known"
    assert not any(each.done() for each in waiting)
    issuer.release.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in answers} == {Unauthenticated}
    assert issuer.asked == asked + 1
    await asyncio.to_thread(verifier.stop)


@OUTAGE
@pytest.mark.real_time
@pytest.mark.usefixtures("acme")
def test_nobody_waits_longer_than_the_fetch_may_take(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.auth.verifier._WAIT_SECONDS", 0.2)
    issuer.answer = issuer.hang
    with pytest.raises(CodeqError) as refusal:
        Verifier().verify(signer.token())
    assert isinstance(refusal.value, Unavailable)


@OUTAGE
@pytest.mark.real_time
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_one_who_gives_up_waiting_for_keys_spoils_it_for_nobody(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, issuer.answer = Verifier(), issuer.hang
    monkeypatch.setattr("tenants.auth.verifier._WAIT_SECONDS", 0.05)
    with pytest.raises(Unavailable):
        await one.verify_async(signer.token(jti="impatient"))
    monkeypatch.undo()
    gone = asyncio.ensure_future(one.verify_async(signer.token(jti="gone")))
    stays = asyncio.ensure_future(one.verify_async(signer.token(jti="stays")))
    await asyncio.sleep(0.05)
    gone.cancel()
    issuer.release.set()
    assert (await asyncio.wait_for(stays, 5)).tenant.slug == "acme"
    assert issuer.asked == 1
    await asyncio.to_thread(one.stop)
