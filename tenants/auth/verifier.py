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

import msgspec
from django.db import connections
from django.utils.module_loading import import_string

from core.conf import conf
from core.errors import Forbidden, TenantSuspended, Unauthenticated, Unavailable
from tenants import http_fetch, services
from tenants.auth import jwks
from tenants.auth.claims import Verified, identity
from tenants.auth.validators import Validator
from tenants.cache import TenantCache, tenant_cache
from tenants.domain import Caller, TenantSnapshot

TOKEN_LENGTH = 16 * 2**10
CACHE_LIMIT = 10_000
_THREADS = 8
_WAIT_SECONDS = http_fetch.DEADLINE_SECONDS + 1
_ROUNDS = 3  # a token needs one fetch of keys at most; more would be a fault, and not one to wait for


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
        tenants: TenantCache = tenant_cache,
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

    def _tenant(self, slug: str) -> TenantSnapshot:
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
