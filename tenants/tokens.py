"""Verification: from the text of a bearer token to the Caller it speaks for, remembered for a minute."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import jwt
import msgspec
from django.db import connections
from django.utils.module_loading import import_string
from jwt.api_jws import PyJWS

from codeq_site.conf import conf
from codeq_site.errors import Forbidden, TenantSuspended, Unauthenticated, Unavailable
from tenants import fetching, jwks, keys, services
from tenants.claims import TENANT_CLAIMS, Verified, identity
from tenants.directory import Directory, directory
from tenants.tenant import Caller, Tenant

TOKEN_LENGTH = 16 * 2**10
CACHE_LIMIT = 10_000
_THREADS = 8
_WAIT_SECONDS = fetching.DEADLINE_SECONDS + 1
_ROUNDS = 3  # a token needs one fetch of keys at most; more would be a fault, and not one to wait for
_JWS = PyJWS(algorithms=list(jwks.ALGORITHMS))


class Validator(Protocol):
    """Somebody who can tell whether a token is genuine. Named by dotted path in `auth.validators`, made once.

    `validate` returns the claims it vouches for, None for a token that is none of its business (the next one
    is asked), and raises Unauthenticated for one that is and is not genuine. It runs off the event loop and
    may block; it need not look at times, audience, subject or tenant: that is done for all alike.
    """

    def validate(self, token: str) -> Verified | None: ...


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    crit: msgspec.UnsetType | Any = msgspec.UNSET


class Unverified(msgspec.Struct, frozen=True):
    """What a token says of itself, to choose the keys that can confirm it. Good for nothing else."""

    algorithm: str
    kid: str | None
    issuer: str
    claims: dict[str, Any]


def peek(token: str) -> Unverified | None:
    """What the token says of itself, or None where it is no signed JWT of an algorithm we accept."""
    parts = token.split(".")
    # The library tolerates padding, which would give one token a second spelling, and a second rate limit.
    if len(parts) != 3 or not all(parts) or "=" in token:
        return None
    try:
        header = msgspec.json.decode(jwt.utils.base64url_decode(parts[0]), type=_Header)
        claims = msgspec.json.decode(jwt.utils.base64url_decode(parts[1]), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    issuer = claims.get("iss")
    # `crit` names extensions that must be understood (RFC 7515 §4.1.11), and we understand none.
    if header.alg not in jwks.ALGORITHMS or header.crit is not msgspec.UNSET or not isinstance(issuer, str):
        return None
    return Unverified(header.alg, header.kid, issuer, claims)


def confirm(token: str, unverified: Unverified, key: jwks.Key | None) -> dict[str, Any]:
    """The claims, once `key` has signed them. Raises Unauthenticated."""
    if key is None or key.algorithm != unverified.algorithm:
        raise Unauthenticated("The token is signed with a key that is not known here.")
    try:
        signed = _JWS.decode_complete(token, key.material, algorithms=[key.algorithm])
        # From the bytes that were signed, and not from what `peek` made of the text.
        return msgspec.json.decode(signed["payload"], type=dict[str, Any])
    except (jwt.PyJWTError, ValueError) as error:
        raise Unauthenticated("The token's signature is not right.") from error


class JwksValidator:
    """The installation's issuer: its JWKS by URL, or this installation's own key pair."""

    def __init__(self, source: jwks.KeySet | None = None) -> None:
        url = conf().auth.jwks_url
        self._keys = source or (keys_at(url) if url else keys.own_keys)

    def validate(self, token: str) -> Verified | None:
        unverified = peek(token)
        auth = conf().auth
        if unverified is None or unverified.issuer != auth.issuer:
            return None
        key = self._keys.find(unverified.kid, unverified.algorithm)
        return Verified(
            claims=confirm(token, unverified, key),
            producer_audience=auth.producer_audience,
            worker_audience=auth.worker_audience,
        )


class TenantKeyValidator:
    """The tenants' own issuers (TenantIssuer rows). Each speaks for its tenant only."""

    def __init__(self) -> None:
        self._sets: dict[str, jwks.KeySet] = {}

    def validate(self, token: str) -> Verified | None:
        unverified = peek(token)
        if unverified is None:
            return None
        named = {value for name in TENANT_CLAIMS if isinstance(value := unverified.claims.get(name), str)}
        if len(named) != 1:
            return None
        slug = named.pop()
        issuer = directory.issuer(slug, unverified.issuer)
        if issuer is None:
            return None
        if issuer.jwks_url:
            source = self._sets.get(issuer.jwks_url) or self._sets.setdefault(issuer.jwks_url, keys_at(issuer.jwks_url))
            key = source.find(unverified.kid, unverified.algorithm)
        else:
            key = jwks.select(issuer.keys, unverified.kid, unverified.algorithm)
        auth = conf().auth
        return Verified(
            claims=confirm(token, unverified, key),
            tenant=slug,
            producer_audience=issuer.producer_audience or auth.producer_audience,
            worker_audience=issuer.worker_audience or auth.worker_audience,
        )


def keys_at(url: str) -> jwks.KeySet:
    return jwks.KeySet(url, lambda: jwks.keys_of(fetching.fetch_json(url)))


class _Cached(msgspec.Struct):
    caller: Caller
    until: float


class Verifier:
    """Verifies tokens and remembers good ones by their hash: a minute at most, and no longer than they live.

    The tenant is looked up at every use, so a suspension is in force long before the memory fades.
    """

    def __init__(
        self,
        validators: list[Validator] | None = None,
        *,
        tenants: Directory = directory,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._given = validators
        self._tenants = tenants
        self._clock = clock
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._validators: list[Validator] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._verifying: dict[bytes, asyncio.Future[Caller]] = {}

    def cached(self, token: str, *, finishing: bool = False) -> Caller | None:
        """The caller, if the token has been verified lately. No query, no await, no lock."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        hit = self._cache.get(digest)
        if hit is None or self._clock() >= hit.until:
            return None
        caller = hit.caller
        tenant = self._tenants.known(caller.tenant.slug)
        if tenant is not caller.tenant:
            if tenant is None or tenant.tid != caller.tenant.tid:
                return None
            caller = hit.caller = msgspec.structs.replace(caller, tenant=tenant)
        if caller.tenant.suspended and not finishing:
            raise TenantSuspended()
        return caller

    def verify(self, token: str, *, finishing: bool = False) -> Caller:
        """The caller the token speaks for. May block.

        Raises Unauthenticated, Forbidden, TenantSuspended or Unavailable.
        `finishing` lets a suspended tenant through, for verbs that end work already claimed.
        """
        caller = self.cached(token, finishing=finishing)
        if caller is not None:
            return caller
        for _ in range(_ROUNDS):
            try:
                return _admit(self._verify(token), finishing)
            except jwks.Pending as pending:
                _wait(pending.flight)
        raise _keys_are_late()

    async def verify_async(self, token: str, *, finishing: bool = False) -> Caller:
        """As `verify`, and nothing that may block runs on the event loop."""
        caller = self.cached(token, finishing=finishing)
        if caller is not None:
            return caller
        # A client that opens fifty connections at once sends one new token fifty times.
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        shared = self._verifying.get(digest)
        if shared is None or shared.get_loop() is not asyncio.get_running_loop():
            shared = self._verifying[digest] = asyncio.ensure_future(self._verify_off_loop(token))
            shared.add_done_callback(lambda done: self._verified(digest, done))
        return _admit(await asyncio.shield(shared), finishing)

    def stop(self) -> None:
        """Forget everything and end the threads; the next token starts anew."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self.forget()

    def forget(self) -> None:
        """Start anew, as in a forked child, which has not inherited the threads."""
        self._cache, self._verifying = OrderedDict(), {}
        self._pool = self._validators = None

    def _verified(self, digest: bytes, done: asyncio.Future[Caller]) -> None:
        if self._verifying.get(digest) is done:
            del self._verifying[digest]
        if not done.cancelled():
            done.exception()  # whoever waited has it; if all of them went away, nobody needs to hear

    async def _verify_off_loop(self, token: str) -> Caller:
        loop = asyncio.get_running_loop()
        for _ in range(_ROUNDS):
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens")
            try:
                return await loop.run_in_executor(self._pool, self._verify_in_thread, token)
            except jwks.Pending as pending:
                # Waited for here and not in the pool: keys that come slowly must not hold up other tokens.
                try:
                    await asyncio.wait_for(asyncio.wrap_future(pending.flight), _WAIT_SECONDS)
                except TimeoutError as error:
                    raise _keys_are_late() from error
        raise _keys_are_late()

    def _verify_in_thread(self, token: str) -> Caller:
        try:
            return self._verify(token)
        finally:
            # Queries are rare here, and eight idle connections per process would be too many for PostgreSQL.
            connections.close_all()

    def _verify(self, token: str) -> Caller:
        if len(token) > TOKEN_LENGTH or not token.isascii():
            raise Unauthenticated()
        now = self._clock()
        verified = self._ask_validators(token)
        who = identity(verified, conf().auth, now)
        digest = hashlib.sha256(token.encode("ascii")).digest()
        caller = Caller(
            tenant=self._tenant(who.slug),
            subject=who.subject,
            roles=who.roles,
            scopes=who.scopes,
            commands=who.commands,
            group=who.group,
            fingerprint=digest[:9].hex(),
            expires_at=who.expires_at,
        )
        self._cache[digest] = _Cached(caller, min(now + conf().auth.cache_seconds, who.expires_at))
        while len(self._cache) > CACHE_LIMIT:
            self._cache.popitem(last=False)
        return caller

    def _ask_validators(self, token: str) -> Verified:
        if self._validators is None:
            self._validators = self._given or [import_string(path)() for path in conf().auth.validators]
        for validator in self._validators:
            verified = validator.validate(token)
            if verified is not None:
                return verified
        raise Unauthenticated()

    def _tenant(self, slug: str) -> Tenant:
        tenant = self._tenants.find(slug)
        if tenant is None and conf().auth.provision_tenants:
            tenant = services.provision(slug)
        if tenant is None:
            raise Forbidden("The token's tenant is not known here.")
        return tenant


def _admit(caller: Caller, finishing: bool) -> Caller:
    if caller.tenant.suspended and not finishing:
        raise TenantSuspended()
    return caller


def _wait(flight: Future[None]) -> None:
    try:
        flight.result(_WAIT_SECONDS)
    except FutureTimeout as error:
        raise _keys_are_late() from error


def _keys_are_late() -> Unavailable:
    return Unavailable("The keys that verify tokens cannot be fetched right now.", retry_after_seconds=5)


verifier = Verifier()
os.register_at_fork(after_in_child=verifier.forget)
