"""Tenants, issuers and a JWKS server on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from core.conf import conf
from tenants import models, services
from tenants.auth import installation_keys
from tenants.auth.verifier import Verifier, verifier
from tenants.cache import tenant_cache
from tests.tenants.minting import ISSUER, Signer

Configure = Callable[..., None]


def run_inline(job: Callable[[], None]) -> None:
    """Run the job in the calling thread: a KeyCache with this as `start` starts no thread."""
    job()


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    """Empty the caches, and end threads with connections to the test database."""
    # Fetch keys in the test's thread, whose connection sees the uncommitted rows of the test.
    installation_keys.own_keys._start, start = run_inline, installation_keys.own_keys._start
    yield
    installation_keys.own_keys._start = start
    verifier.stop()
    tenant_cache.stop()
    installation_keys.own_keys.forget()


@pytest.fixture
def configure(settings: Any) -> Iterator[Configure]:
    """`configure(auth={"single_tenant": True})` changes settings until the end of the test."""

    def change(**changes: object) -> None:
        values = {**settings.CODEQ}
        for name, change in changes.items():
            values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
        settings.CODEQ = values
        conf.cache_clear()

    yield change
    conf.cache_clear()


class JwksServer:
    """An issuer's key server, which counts its requests. By default it returns `keys`."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.requests = 0
        self.release = threading.Event()
        self.respond: Callable[[BaseHTTPRequestHandler], None] = self.send_keys
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requests += 1
                try:
                    owner.respond(self)
                except OSError:
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks.json"
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def send_keys(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(handler, 200, json.dumps({"keys": self.keys}).encode())

    def hang(self, handler: BaseHTTPRequestHandler) -> None:
        """Respond only when `release` is set."""
        self.release.wait(30)
        self.send_keys(handler)

    def send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def jwks_server() -> Iterator[JwksServer]:
    server = JwksServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def signers() -> dict[str, Signer]:
    """A key pair of every accepted algorithm."""
    return {name: Signer(name, f"key-{name}") for name in ("RS256", "ES256", "EdDSA")}


@pytest.fixture
def signer(signers: dict[str, Signer]) -> Signer:
    return signers["ES256"]


@pytest.fixture
def issuer(configure: Configure, jwks_server: JwksServer, signers: dict[str, Signer]) -> JwksServer:
    """The installation trusts the issuer whose JWKS server publishes the keys of `signers`."""
    jwks_server.keys = [signer.jwk for signer in signers.values()]
    configure(auth={"jwks_url": jwks_server.url, "issuer": ISSUER})
    return jwks_server


@pytest.fixture
def acme(db: None) -> models.Tenant:
    return services.create_tenant("acme")


@pytest.fixture
def other(db: None) -> models.Tenant:
    return services.create_tenant("other")


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fresh_verifier(issuer: JwksServer) -> Iterator[Verifier]:
    """A new verifier that trusts `issuer`."""
    verifier = Verifier()
    yield verifier
    verifier.stop()
