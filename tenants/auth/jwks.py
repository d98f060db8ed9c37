"""Public keys that verify tokens: the parser of JWKS documents, and a cache of keys.

The cache keeps the last good keys during an outage of their source, and limits the fetches that forged tokens cause.
"""

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

# A constant, not a setting, because other algorithms allow forgery: `none`, or HS256 with a public key as the secret.
ALGORITHMS = ("RS256", "ES256", "EdDSA")
# By `kty`: the algorithm, the curve and the public members of a key. A key verifies one algorithm only, regardless of
# the token's header (RFC 8725 §3.1). Private members are not read, even if they are published by mistake.
_KEY_TYPES = {
    "RSA": ("RS256", None, ("n", "e")),
    "EC": ("ES256", "P-256", ("crv", "x", "y")),
    "OKP": ("EdDSA", "Ed25519", ("crv", "x")),
}
_RSA_BITS = range(2048, 8193)  # verifying with a larger key takes long enough for a denial-of-service attack


class Key(msgspec.Struct, frozen=True):
    """A public key. `material` is the key object of the cryptography library."""

    kid: str
    algorithm: str
    material: Any


def parse_keys(document: object) -> dict[str, Key]:
    """Return the usable signature keys of a JWKS document by `kid` ("" if a key has no `kid`).

    Unusable entries are left out.
    """
    entries = document.get("keys") if isinstance(document, dict) else None
    keys: dict[str, Key] = {}
    for entry in entries if isinstance(entries, list) else ():
        key = _parse_key(entry) if isinstance(entry, dict) else None
        if key is not None:
            keys.setdefault(key.kid, key)
    return keys


def _parse_key(entry: dict[str, Any]) -> Key | None:
    kid, key_type = entry.get("kid", ""), _KEY_TYPES.get(str(entry.get("kty")))
    if key_type is None or not isinstance(kid, str):
        return None
    algorithm, curve, members = key_type
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
    """Return the key that a token's header names, or None.

    A token without `kid` matches only if exactly one key has its algorithm.
    """
    if kid is not None:
        return keys.get(kid) if kid else None
    candidates = [key for key in keys.values() if key.algorithm == algorithm]
    return candidates[0] if len(candidates) == 1 else None


class KeysPending(Exception):
    """The keys are being fetched. Wait for `fetch`, then look up the key again.

    A caller on the event loop can await it without occupying a thread; a caller in a thread can block on it.
    """

    def __init__(self, fetch: Future[None]) -> None:
        super().__init__()
        self.fetch = fetch


class RefreshPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The ages at which cached keys are fetched again, and minimum intervals between fetches."""

    fresh_seconds: float = 60.0  # up to this age the keys are not fetched again
    serve_stale_seconds: float = 300.0  # up to this age they are used during the fetch; after it, callers wait for it
    max_age_seconds: float = 86_400.0  # up to this age they are used while their source is down
    unknown_key_interval_seconds: float = 30.0  # between fetches for a token whose key is not cached
    retry_interval_seconds: float = 5.0  # between any two fetches


REFRESH_POLICY = RefreshPolicy()


class KeyCache:
    """A cache of the keys of one source.

    A lookup never blocks: it returns, or raises KeysPending while a fetch is under way. All callers share one fetch.
    A failed fetch, or one without a usable key, never replaces good keys.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[], Mapping[str, Key]],
        *,
        policy: RefreshPolicy = REFRESH_POLICY,
        start: Callable[[Callable[[], None]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._fetch_keys = fetch
        self._policy = policy
        self._start = start or _run_in_thread
        self._clock = clock
        self._lock = threading.Lock()
        self._fetch: Future[None] | None = None  # the fetch under way
        self._keys: Mapping[str, Key] = {}
        # Times of the last good fetch, of the last fetch, and of the last fetch for an unknown key.
        self._fetched_at = self._tried_at = self._unknown_at = float("-inf")
        self._is_failing = False

    def find(self, kid: str | None, algorithm: str) -> Key | None:
        """Return the key, or None if the source does not have it.

        Raises KeysPending while the keys are being fetched, and Unavailable if there are no keys younger than
        `max_age_seconds`.
        """
        fetch = self._required_fetch(kid, algorithm)
        if fetch is not None:
            raise KeysPending(fetch)
        # Read the time now: another thread's fetch may have ended since `_required_fetch`.
        if self._clock() - self._fetched_at > self._policy.max_age_seconds:
            raise keys_unavailable()
        return select(self._keys, kid, algorithm)

    @property
    def is_fetching(self) -> bool:
        return self._fetch is not None

    def _required_fetch(self, kid: str | None, algorithm: str) -> Future[None] | None:
        """Return the fetch that the caller has to wait for, or None. Starts a fetch if one is due."""
        now, policy = self._clock(), self._policy
        age = now - self._fetched_at
        if age > policy.max_age_seconds:
            return self._start_fetch(now)
        if select(self._keys, kid, algorithm) is None:
            # Forged tokens with random kids must not cause a flood of fetches.
            may_fetch = self._fetch is not None or now - self._unknown_at >= policy.unknown_key_interval_seconds
            return self._start_fetch(now, is_unknown=True) if may_fetch else None
        if age > policy.fresh_seconds:
            fetch = self._start_fetch(now)
            # The key may have been withdrawn since the last fetch, so the token waits, unless the source is down.
            if age > policy.serve_stale_seconds and not self._is_failing:
                return fetch
        return None

    def forget(self) -> None:
        """Make the next lookup fetch the keys again."""
        with self._lock:
            self._fetched_at = self._tried_at = self._unknown_at = float("-inf")
            self._is_failing = False

    def _start_fetch(self, now: float, *, is_unknown: bool = False) -> Future[None] | None:
        """Return the fetch under way, or start one; None if the retry interval has not passed."""
        with self._lock:
            if self._fetch is not None:
                return self._fetch
            if now - self._tried_at < self._policy.retry_interval_seconds:
                return None
            fetch = self._fetch = Future[None]()
            # A running future cannot be cancelled, so a caller that stops waiting does not end it for the others.
            fetch.set_running_or_notify_cancel()
            self._tried_at = now
            if is_unknown:
                self._unknown_at = now
        try:
            self._start(lambda: self._run_fetch(fetch))
        except RuntimeError:
            # No thread could be started. End the fetch, so that its callers do not wait for their deadline.
            self._finish_fetch(fetch, is_good=False)
        return fetch

    def _run_fetch(self, fetch: Future[None]) -> None:
        is_good = False
        try:
            keys = self._fetch_keys()
            if keys:
                self._keys, self._fetched_at, is_good = dict(keys), self._clock(), True
            else:
                log.warning("keys of %s: ignored a response without a usable key", self._name)
        except (OSError, ValueError, Unavailable) as error:
            log.warning("keys of %s could not be fetched: %s", self._name, error)
        finally:
            # Wake the callers after an unexpected error, too.
            self._finish_fetch(fetch, is_good=is_good)

    def _finish_fetch(self, fetch: Future[None], *, is_good: bool) -> None:
        with self._lock:
            self._fetch = None
            self._tried_at = self._clock()
            self._is_failing = not is_good
        fetch.set_result(None)


def keys_unavailable() -> Unavailable:
    """Return the error for a token whose keys cannot be fetched."""
    return Unavailable(
        "The keys that verify tokens cannot be fetched. Try again in a few seconds.", retry_after_seconds=5
    )


def _run_in_thread(job: Callable[[], None]) -> None:
    threading.Thread(target=job, name="jwks", daemon=True).start()
