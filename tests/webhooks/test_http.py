"""One POST request: its deadline, limits, redirects, addresses and certificates."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.webhooks.conftest import Configure, MakeReceiver
from tests.webhooks.receiver import Receiver, drip, hang, raw, status
from webhooks import http


async def test_body_arrives_unchanged(receiver: Receiver) -> None:
    posted = await http.post(receiver.url("/a?b=c"), {"X-One": "1"}, '{"ü":"€"}'.encode())
    assert (posted.status, posted.error, posted.answer) == (200, "", b"ok")
    [request] = receiver.requests
    assert (request.method, request.path, request.body.decode()) == ("POST", "/a?b=c", '{"ü":"€"}')
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["x-one"] == "1"


async def test_large_body_is_sent_completely(receiver: Receiver) -> None:
    body = b"x" * 4_000_000
    assert (await http.post(receiver.url(), {}, body)).status == 200
    assert receiver.requests[0].body == body


SLOW = {
    "never answers": hang,
    "drips a head": drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "drips a status": drip(b"HTTP/1.1 2", b"0"),
    "repeats 103": drip(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", every=0.01),
}


@pytest.mark.spec("WHK-3", "An endpoint that hangs or responds slowly holds a slot until the total deadline at most")
@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW.keys())
async def test_slow_endpoint_ends_by_the_total_deadline(receiver: Receiver, answer: Callable[..., object]) -> None:
    receiver.answer = answer  # type: ignore[assignment]
    started = time.monotonic()
    posted = await http.post(receiver.url(), {}, b"{}", deadline_seconds=0.5)
    assert time.monotonic() - started < 10
    assert posted.status is None
    assert posted.error


async def test_endpoint_that_does_not_read_ends_by_the_total_deadline(loopback: None) -> None:
    is_done = asyncio.Event()

    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await is_done.wait()
        writer.transport.abort()

    async with await asyncio.start_server(never_read, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        started = time.monotonic()
        posted = await http.post(url, {}, b"x" * 50_000_000, deadline_seconds=0.5)
        is_done.set()
        assert time.monotonic() - started < 10
        assert posted.status is None


async def test_status_counts_even_if_the_body_is_slow(receiver: Receiver) -> None:
    """Otherwise an endpoint that has accepted the event would receive retries for a day."""
    receiver.answer = drip(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nwell", b"x")
    started = time.monotonic()
    posted = await http.post(receiver.url(), {}, b"{}", deadline_seconds=2.0)
    assert time.monotonic() - started < 10
    assert posted.status == 200
    assert posted.answer.startswith(b"well")


async def test_endless_response_is_read_up_to_the_limit(receiver: Receiver, configure: Configure) -> None:
    configure(answer_bytes=64 * 2**10)
    receiver.answer = drip(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n", b"x" * 2**20, every=0)
    posted = await http.post(receiver.url(), {}, b"{}")
    assert (posted.status, len(posted.answer)) == (200, 64 * 2**10)
    assert posted.duration_ms < 10_000


@pytest.mark.spec("WHK-5", "A redirect is a failure and is not followed")
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirect_is_not_followed(receiver: Receiver, make_receiver: MakeReceiver, code: int) -> None:
    other = make_receiver()
    receiver.answer = status(code, location=other.url())
    posted = await http.post(receiver.url(), {}, b"{}")
    assert (posted.status, posted.is_delivered) == (code, False)
    assert other.connections == 0


INVALID = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "HTTP/0.9": b"hello",
    "nothing": b"",
    "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "NUL in the head": b"HTTP/1.1 200 OK\r\nX: \0\r\n\r\n",
}


@pytest.mark.parametrize("answer", INVALID.values(), ids=INVALID.keys())
async def test_invalid_response_is_a_failed_attempt(receiver: Receiver, answer: bytes) -> None:
    receiver.answer = raw(answer)
    posted = await http.post(receiver.url(), {}, b"{}", deadline_seconds=3)
    assert posted.status is None
    assert "\n" not in posted.error
    assert len(posted.error) < 300


async def test_closed_port_is_a_failed_attempt(receiver: Receiver) -> None:
    url = receiver.url()
    receiver.stop()
    posted = await http.post(url, {}, b"{}")
    assert posted.status is None
    assert posted.error.startswith("no connection")


async def test_second_address_is_tried_if_the_first_is_unreachable(loopback: None, make_receiver: MakeReceiver) -> None:
    receiver = make_receiver(host="127.0.0.3")

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.3"]

    assert (await http.post(f"http://example.org:{receiver.port}/", {}, b"{}", resolve=resolve)).status == 200


async def test_proxy_of_the_environment_is_not_used(
    receiver: Receiver, make_receiver: MakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = make_receiver()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url(""))
    assert (await http.post(receiver.url(), {}, b"{}")).status == 200
    assert proxy.connections == 0


class Authority:
    """A certificate authority that issues server certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign("a test's authority", self.key.public_key(), None, is_ca=True)
        self.trusted = ssl.create_default_context(
            cadata=self.certificate.public_bytes(serialization.Encoding.PEM).decode()
        )

    def server(self, name: str, *, days: int = 1, sign: bool = True) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), name, days=days, by=self.key if sign else key)
        file = self.directory / f"{name}-{days}-{sign}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        san: str | None,
        *,
        days: int = 1,
        is_ca: bool = False,
        by: ec.EllipticCurvePrivateKey | None = None,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's authority")]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=3))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if is_ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        if san:
            try:
                names: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(san))
            except ValueError:
                names = x509.DNSName(san)
            builder = builder.add_extension(x509.SubjectAlternativeName([names]), critical=False)
        return builder.sign(by or self.key, hashes.SHA256())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.mark.spec("WHK-5", "The certificate must match the host name, although the connection is to an address")
async def test_tls_uses_the_host_name_of_the_url(
    loopback: None, make_receiver: MakeReceiver, authority: Authority
) -> None:
    receiver = make_receiver(tls=authority.server("hooks.example.org"))
    url = receiver.url(host="hooks.example.org")
    posted = await http.post(url, {}, b"{}", resolve=to_loopback, tls=authority.trusted)
    assert posted.status == 200
    assert receiver.requests[0].headers["host"] == f"hooks.example.org:{receiver.port}"

    literal = make_receiver(tls=authority.server("127.0.0.1"))
    assert (await http.post(literal.url(), {}, b"{}", tls=authority.trusted)).status == 200


@pytest.mark.spec("WHK-5", "An expired, wrong or self-signed certificate is refused before anything is sent")
@pytest.mark.parametrize("wrong", ["expired", "of another name", "self-signed", "of an unknown authority"])
async def test_wrong_certificate_is_refused(
    loopback: None, make_receiver: MakeReceiver, authority: Authority, wrong: str
) -> None:
    contexts = {
        "expired": lambda: authority.server("hooks.example.org", days=-1),
        "of another name": lambda: authority.server("other.example.org"),
        "self-signed": lambda: authority.server("hooks.example.org", sign=False),
        "of an unknown authority": lambda: authority.server("hooks.example.org"),
    }
    receiver = make_receiver(tls=contexts[wrong]())
    trusted = None if wrong == "of an unknown authority" else authority.trusted
    url = f"https://hooks.example.org:{receiver.port}/"
    posted = await http.post(url, {}, b"{}", resolve=to_loopback, tls=trusted)
    assert posted.status is None
    assert posted.error.startswith("TLS: ")
    assert receiver.requests == []


async def test_plain_http_in_production_is_limited_to_allowed_networks(
    settings: object, configure: Configure, make_receiver: MakeReceiver
) -> None:
    receiver = make_receiver()
    configure(allow_hosts=["127.0.0.0/8"])
    settings.CODEQ = {**settings.CODEQ, "production": True}  # type: ignore[attr-defined]
    http.conf.cache_clear()

    async def public(host: str, port: int) -> Sequence[str]:
        return ["8.8.8.8"]

    assert (await http.post(receiver.url(), {}, b"{}")).status == 200
    assert (
        await http.post("http://example.org/", {}, b"{}", resolve=public)
    ).error == "refused: the URL must begin with https://"
