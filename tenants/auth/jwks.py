"""Public keys: which of a JWKS document are used, and a cache of them that no outage or flood can empty."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from core.errors import Unavailable

log = logging.getLogger(__name__)

# A constant, not a setting: every other algorithm is a way in (`none`, HS256 keyed with a public key).
ALGORITHMS = ("RS256", "ES256", "EdDSA")
# A key is good for exactly one algorithm, whatever the token's header asks for (RFC 8725 §3.1), and only its
# public members are read: a private key published by mistake is not loaded as one.
_KINDS = {
    "RSA": ("RS256", None, ("n", "e")),
    "EC": ("ES256", "P-256", ("crv", "x", "y")),
    "OKP": ("EdDSA", "Ed25519", ("crv", "x")),
}
_RSA_BITS = range(2048, 8193)  # more than that makes every verification a favour to an attacker


class Key(msgspec.Struct, frozen=True):
    kid: str
    algorithm: str
    material: Any


def keys_of(document: object) -> dict[str, Key]:
    """The usable signature keys of a JWKS document by `kid` ("" for none); odd entries are left out."""
    entries = document.get("keys") if isinstance(document, dict) else None
    found: dict[str, Key] = {}
    for entry in entries if isinstance(entries, list) else ():
        key = _key_of(entry) if isinstance(entry, dict) else None
        if key is not None:
            found.setdefault(key.kid, key)
    return found


def _key_of(entry: dict[str, Any]) -> Key | None:
    kid, kind = entry.get("kid", ""), _KINDS.get(str(entry.get("kty")))
    if kind is None or not isinstance(kid, str):
        return None
    algorithm, curve, members = kind
    if entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm or entry.get("crv") != curve:
        return None
    try:
        public = {name: entry[name] for name in members}
        material = jwt.PyJWK({"kty": entry["kty"], **public}, algorithm).key
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        return None
    if isinstance(material, RSAPublicKey) and material.key_size not in _RSA_BITS:
        return None
    return Key(kid, algorithm, material)


def select(keys: Mapping[str, Key], kid: str | None, algorithm: str) -> Key | None:
    """The key a token's header means. Without a `kid` only a set that leaves no choice has an answer."""
    if kid is not None:
        return keys.get(kid) if kid else None
    fitting = [key for key in keys.values() if key.algorithm == algorithm]
    return fitting[0] if len(fitting) == 1 else None


class Pending(Exception):
    """The answer waits for keys that are being fetched: wait for `flight`, then ask again.

    It lets a caller on the event loop wait without a thread, and one in a thread without a loop.
    """

    def __init__(self, flight: Future[None]) -> None:
        super().__init__()
        self.flight = flight


class RefreshPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often a key set is fetched, in seconds."""

    fresh: float = 60.0  # so long the set is not fetched again
    lenient: float = 300.0  # so long an old set answers at once while it is fetched again; older ones wait for it
    stale: float = 86_400.0  # so long the last good set serves while its source is down
    unknown: float = 30.0  # between two fetches made because a token names a key nobody knows
    retry: float = 5.0  # between any two fetches


REFRESH_POLICY = RefreshPolicy()


class KeySet:
    """The keys of one source. Asking never blocks: it answers, or raises Pending while a fetch is under way.

    One fetch at a time, however many ask. A set that is no longer fresh goes on answering while it is fetched
    again; a failed, empty or garbled answer never replaces a good one.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[], Mapping[str, Key]],
        *,
        pace: RefreshPolicy = REFRESH_POLICY,
        start: Callable[[Callable[[], None]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._fetch = fetch
        self._pace = pace
        self._start = start or _in_a_thread
        self._clock = clock
        self._lock = threading.Lock()
        self._flight: Future[None] | None = None
        self._keys: Mapping[str, Key] = {}
        self._fetched = self._tried = self._asked = float("-inf")
        self._is_failing = False

    def find(self, kid: str | None, algorithm: str) -> Key | None:
        """The key, or None when the source does not have it.

        Raises Pending while that is being found out, and Unavailable when the source has never answered.
        """
        flight = self._needed(kid, algorithm)
        if flight is not None:
            raise Pending(flight)
        # Looked at now and not before: another thread's fetch may just have ended.
        if self._clock() - self._fetched > self._pace.stale:
            raise Unavailable("The keys that verify tokens cannot be fetched right now.", retry_after_seconds=5)
        return select(self._keys, kid, algorithm)

    @property
    def is_fetching(self) -> bool:
        return self._flight is not None

    def _needed(self, kid: str | None, algorithm: str) -> Future[None] | None:
        """The fetch that the answer has to wait for; None when it need not or must not."""
        now, pace = self._clock(), self._pace
        age = now - self._fetched
        if age > pace.stale:
            return self._begin(now)
        if select(self._keys, kid, algorithm) is None:
            # Random kids must not become a flood of fetches: few are made on their account.
            may_ask = self._flight is not None or now - self._asked >= pace.unknown
            return self._begin(now, is_unknown=True) if may_ask else None
        if age > pace.fresh:
            flight = self._begin(now)
            # After a quiet hour the first token could be one of a key withdrawn since, so it waits. But a source
            # that is known to be down is not waited for.
            if age > pace.lenient and not self._is_failing:
                return flight
        return None

    def forget(self) -> None:
        """Fetch again at the next question."""
        with self._lock:
            self._fetched = self._tried = self._asked = float("-inf")
            self._is_failing = False

    def _begin(self, now: float, *, is_unknown: bool = False) -> Future[None] | None:
        """The fetch under way, begun here if the last one is long enough ago; None when it is not."""
        with self._lock:
            if self._flight is not None:
                return self._flight
            if now - self._tried < self._pace.retry:
                return None
            flight = self._flight = Future[None]()
            # From here on it cannot be cancelled: one waiter that gives up must not end it for the others.
            flight.set_running_or_notify_cancel()
            self._tried = now
            if is_unknown:
                self._asked = now
        try:
            self._start(lambda: self._fly(flight))
        except RuntimeError:
            # No thread to be had: whoever waits for this flight would wait for nothing.
            self._land(flight, is_good=False)
        return flight

    def _fly(self, flight: Future[None]) -> None:
        is_good = False
        try:
            keys = self._fetch()
            if keys:
                self._keys, self._fetched, is_good = dict(keys), self._clock(), True
            else:
                log.warning("keys of %s: an answer without a usable key was ignored", self._name)
        except (OSError, ValueError, Unavailable) as error:
            log.warning("keys of %s could not be fetched: %s", self._name, error)
        finally:
            # Whoever waits must wake up, also when the fetch broke in a way nobody thought of.
            self._land(flight, is_good=is_good)

    def _land(self, flight: Future[None], *, is_good: bool) -> None:
        with self._lock:
            self._flight = None
            self._tried = self._clock()
            self._is_failing = not is_good
        flight.set_result(None)


def _in_a_thread(job: Callable[[], None]) -> None:
    threading.Thread(target=job, name="jwks", daemon=True).start()


def at_once(job: Callable[[], None]) -> None:
    """`start` for a source that may be asked in the caller's own thread."""
    job()
