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
from tenants.auth import installation_keys, jwks
from tenants.auth.verifier import Verifier, verifier
from tenants.cache import tenant_cache
from tests.tenants.minting import ISSUER, Signer

Configure = Callable[..., None]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """No token, tenant or key of another test, and no thread that holds the test database open."""
    # In the test's own thread, which sees what the test has not committed.
    installation_keys.own_keys._start, start = jwks.at_once, installation_keys.own_keys._start
    yield
    installation_keys.own_keys._start = start
    verifier.stop()
    tenant_cache.stop()
    installation_keys.own_keys.forget()


@pytest.fixture
def configure(settings: Any) -> Iterator[Configure]:
    """`configure(auth={"single_tenant": True})`: these settings until the end of the test."""

    def change(**changes: object) -> None:
        values = {**settings.CODEQ}
        for name, change in changes.items():
            values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
        settings.CODEQ = values
        conf.cache_clear()

    yield change
    conf.cache_clear()


class JwksServer:
    """An issuer's key server: answers with `keys`, or as `answer` says; counts what it is asked."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.asked = 0
        self.release = threading.Event()
        self.answer: Callable[[BaseHTTPRequestHandler], None] = self.send_keys
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked += 1
                try:
                    owner.answer(self)
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
        """Answer only once `release` is set."""
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
    """The installation trusts the issuer whose keys are at the JWKS server: `signers`."""
    jwks_server.keys = [each.jwk for each in signers.values()]
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
    """A verifier of its own, trusting `issuer`."""
    one = Verifier()
    yield one
    one.stop()
