"""Verification of bearer tokens, with a cache of verified tokens."""

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
from core.errors import Forbidden, TenantSuspended, Unauthenticated
from tenants import http_fetch, services
from tenants.auth import jwks
from tenants.auth.claims import Verified, parse_identity
from tenants.auth.validators import Validator
from tenants.cache import TenantCache, tenant_cache
from tenants.domain import Caller, TenantSnapshot

TOKEN_LENGTH = 16 * 2**10
CACHE_LIMIT = 10_000
_THREADS = 8
_FETCH_WAIT_SECONDS = http_fetch.DEADLINE_SECONDS + 1
_MAX_FETCHES = 3  # a token needs one fetch of keys; the limit prevents an endless loop after a programming error


class _CachedToken(msgspec.Struct):
    caller: Caller
    expires_at: float


class Verifier:
    """Verifies tokens, and caches the callers of valid tokens by the token's hash.

    A token is cached for `auth.cache_seconds` at most, and not longer than it is valid. The tenant is looked up at
    every use, so a suspension takes effect before the cached token expires.
    """

    def __init__(
        self,
        validators: list[Validator] | None = None,
        *,
        tenants: TenantCache = tenant_cache,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._given_validators = validators
        self._tenants = tenants
        self._clock = clock
        self._cache: OrderedDict[bytes, _CachedToken] = OrderedDict()
        self._validators: list[Validator] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._verifying: dict[bytes, asyncio.Future[Caller]] = {}

    def get_cached(self, token: str, *, allows_suspended: bool = False) -> Caller | None:
        """Return the caller of a cached token, or None. Costs no query, no await and no lock."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        cached = self._cache.get(digest)
        if cached is None or self._clock() >= cached.expires_at:
            return None
        caller = cached.caller
        tenant = self._tenants.get_cached(caller.tenant.slug)
        if tenant is not caller.tenant:
            if tenant is None or tenant.tid != caller.tenant.tid:
                return None
            caller = cached.caller = msgspec.structs.replace(caller, tenant=tenant)
        if caller.tenant.is_suspended and not allows_suspended:
            raise TenantSuspended()
        return caller

    def verify(self, token: str, *, allows_suspended: bool = False) -> Caller:
        """Return the caller of a token. May block.

        Raises Unauthenticated, Forbidden or Unavailable. Also raises TenantSuspended, unless `allows_suspended` is set,
        as it is for the operations on claimed tasks.
        """
        caller = self.get_cached(token, allows_suspended=allows_suspended)
        if caller is not None:
            return caller
        for _ in range(_MAX_FETCHES):
            try:
                return _check_suspended(self._verify(token), allows_suspended)
            except jwks.KeysPending as pending:
                _wait(pending.fetch)
        raise jwks.keys_unavailable()

    async def verify_async(self, token: str, *, allows_suspended: bool = False) -> Caller:
        """Like `verify`, without blocking the event loop."""
        caller = self.get_cached(token, allows_suspended=allows_suspended)
        if caller is not None:
            return caller
        # Share one verification: a client that opens fifty connections sends one new token fifty times.
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        shared = self._verifying.get(digest)
        if shared is None or shared.get_loop() is not asyncio.get_running_loop():
            shared = self._verifying[digest] = asyncio.ensure_future(self._verify_in_pool(token))
            shared.add_done_callback(lambda done: self._end_shared(digest, done))
        return _check_suspended(await asyncio.shield(shared), allows_suspended)

    def stop(self) -> None:
        """End the threads and empty the cache. The next token starts the threads again."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self.reset()

    def reset(self) -> None:
        """Empty the cache. A forked child does this, because it does not inherit the threads."""
        self._cache, self._verifying = OrderedDict(), {}
        self._pool = self._validators = None

    def _end_shared(self, digest: bytes, done: asyncio.Future[Caller]) -> None:
        if self._verifying.get(digest) is done:
            del self._verifying[digest]
        if not done.cancelled():
            done.exception()  # mark it as retrieved: asyncio logs a warning otherwise if all requests were cancelled

    async def _verify_in_pool(self, token: str) -> Caller:
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_FETCHES):
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens")
            try:
                return await loop.run_in_executor(self._pool, self._verify_in_thread, token)
            except jwks.KeysPending as pending:
                # Wait here instead of in the pool, so that slow fetches do not delay other tokens.
                try:
                    await asyncio.wait_for(asyncio.wrap_future(pending.fetch), _FETCH_WAIT_SECONDS)
                except TimeoutError as error:
                    raise jwks.keys_unavailable() from error
        raise jwks.keys_unavailable()

    def _verify_in_thread(self, token: str) -> Caller:
        try:
            return self._verify(token)
        finally:
            # Queries are rare here, and eight idle connections in every process would be too many for PostgreSQL.
            connections.close_all()

    def _verify(self, token: str) -> Caller:
        if len(token) > TOKEN_LENGTH or not token.isascii():
            raise Unauthenticated()
        now = self._clock()
        verified = self._validate(token)
        identity = parse_identity(verified, conf().auth, now)
        digest = hashlib.sha256(token.encode("ascii")).digest()
        caller = Caller(
            tenant=self._find_tenant(identity.slug),
            subject=identity.subject,
            roles=identity.roles,
            scopes=identity.scopes,
            commands=identity.commands,
            group=identity.group,
            fingerprint=digest[:9].hex(),
            expires_at=identity.expires_at,
        )
        self._cache[digest] = _CachedToken(caller, min(now + conf().auth.cache_seconds, identity.expires_at))
        while len(self._cache) > CACHE_LIMIT:
            self._cache.popitem(last=False)
        return caller

    def _validate(self, token: str) -> Verified:
        if self._validators is None:
            self._validators = self._given_validators or [import_string(path)() for path in conf().auth.validators]
        for validator in self._validators:
            verified = validator.validate(token)
            if verified is not None:
                return verified
        raise Unauthenticated()

    def _find_tenant(self, slug: str) -> TenantSnapshot:
        tenant = self._tenants.find(slug)
        if tenant is None and conf().auth.provision_tenants:
            tenant = services.provision(slug)
        if tenant is None:
            raise Forbidden("The token's tenant does not exist.")
        return tenant


def _check_suspended(caller: Caller, allows_suspended: bool) -> Caller:
    if caller.tenant.is_suspended and not allows_suspended:
        raise TenantSuspended()
    return caller


def _wait(fetch: Future[None]) -> None:
    try:
        fetch.result(_FETCH_WAIT_SECONDS)
    except FutureTimeout as error:
        raise jwks.keys_unavailable() from error


verifier = Verifier()
os.register_at_fork(after_in_child=verifier.reset)
