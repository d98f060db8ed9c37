"""No webhook reaches a private address: URLs are checked at registration and at each call."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime

import msgspec
import pytest

from core import http_client, url_check
from core.errors import InvalidRequest
from queues.api import conversion
from queues.api.schemas.tasks import NewTask
from tenants.domain import TenantSnapshot
from tests.waiting import until
from tests.webhooks.conftest import Configure, MakeReceiver
from tests.webhooks.receiver import Receiver
from webhooks import http, subscriptions

# URLs that must never be accepted. `{port}` is a port on which the test listens.
HOSTILE = [
    "http://127.0.0.1:{port}/", "http://127.0.0.2:{port}/", "http://127.1:{port}/", "http://0x7f.1:{port}/",
    "http://0x7f000001:{port}/", "http://0177.0.0.1:{port}/", "http://2130706433:{port}/",
    "http://127.0.0.1.:{port}/", "http://0.0.0.0:{port}/", "http://0:{port}/", "http://localhost:{port}/",
    "http://LOCALHOST:{port}/", "http://localhost.:{port}/", "http://a.localhost:{port}/", "http://ip6-localhost:{port}/",
    "http://[::1]:{port}/", "http://[::]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/", "http://[64:ff9b::7f00:1]:{port}/", "http://[64:ff9b:1::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/", "http://[2001:0:7f00:1::]:{port}/", "http://[fe80::1]:{port}/",
    "http://[fe80::1%25lo]:{port}/", "http://[fc00::1]:{port}/", "http://[ff02::1]:{port}/", "http://[fec0::1]:{port}/",
    "http://[2001:db8::1]:{port}/", "http://[example.com]:{port}/", "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/latest/", "http://metadata.google.internal/", "http://metadata/", "http://10.0.0.1/",
    "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.1.1/", "http://100.64.0.1/", "http://192.0.0.8/",
    "http://192.0.2.1/", "http://198.18.0.1/", "http://198.51.100.1/", "http://203.0.113.1/", "http://224.0.0.1/",
    "http://240.0.0.1/", "http://255.255.255.255/", "http://user@example.org/", "http://user:word@example.org/",
    "http://example.org@127.0.0.1:{port}/", "http://example.org/#fragment", "http://example.org#@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@example.org/", "http://example.org\\@127.0.0.1:{port}/", "http:///127.0.0.1:{port}/",
    "http:127.0.0.1:{port}/", "//127.0.0.1:{port}/", "file:///etc/passwd", "gopher://127.0.0.1:{port}/_x", "ftp://example.org/",
    "javascript:alert(1)", "unix:///run/x.sock", "dict://127.0.0.1:{port}/", "http://example.org:0/",
    "http://example.org:22/", "http://example.org:25/", "http://example.org:6379/", "http://example.org:5432/",
    "http://example.org:65536/", "http://example.org:99999999/", "http://example.org:/", "http://example.org:80x/",
    "http://exa mple.org/", " http://example.org/", "http://example.org/\t", "http://example.org/\n",
    "http://example.org/\r\nX: y",
    "http://example.org/\x00", "http://①②⑦.⓪.⓪.①:{port}/", "http://127。0。0。1:{port}/", "http://ex\u00e4mple.org/",
    "http://%31%32%37.0.0.1:{port}/", "http://example.org%00.evil/", "http://-example.org/", "http://example..org/",
    "http://.example.org/", "http://printer/", "http://printer.local/", "http://db.internal/", "http://",
    "http://?", "",
    "https://" + "a" * 64 + ".org/", "https://example.org/" + "a" * 2048,
]  # fmt: skip


@pytest.fixture
def canary(make_receiver: MakeReceiver) -> Iterator[Receiver]:
    """A listener on every address of this machine, which must never receive a connection."""
    ipv4 = make_receiver(host="0.0.0.0")
    listeners = (ipv4, make_receiver(host="::", port=ipv4.port))
    for address in ("127.0.0.1", "::1"):
        with closing(socket.create_connection((address, ipv4.port), 5)):
            pass
    until(lambda: [listener.connections for listener in listeners] == [1, 1])  # both accept connections
    yield ipv4
    assert [listener.connections for listener in listeners] == [1, 1]


@pytest.mark.spec("WHK-5", "A URL that does not point to a public address is refused at registration")
@pytest.mark.parametrize("url", HOSTILE, ids=repr)
def test_hostile_url_is_refused_at_registration(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^webhook: "):
        url_check.check_url(url.replace("{port}", "18181"))


@pytest.mark.spec("WHK-5", "A hostile URL that was stored anyway is refused at the call: no packet is sent")
async def test_stored_hostile_url_is_refused_at_the_call(canary: Receiver) -> None:
    urls = [url.replace("{port}", str(canary.port)) for url in HOSTILE]
    answers = await asyncio.gather(*(http.post(url, {}, b"{}") for url in urls))
    assert [
        (url, answer.error) for url, answer in zip(urls, answers, strict=True) if not answer.error.startswith("refused")
    ] == []


def resolving(*texts: str) -> http_client.Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return list(texts)

    return resolve


@pytest.mark.spec("WHK-5", "A name is refused if any of the addresses that it resolves to is not public")
@pytest.mark.parametrize(
    "answer",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["127.0.0.1", "8.8.8.8"],
        ["2606:4700::1111", "10.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["fe80::1%lo"],
        ["100.64.0.1"],
        ["192.0.0.8"],
        ["0.0.0.0"],
        ["169.254.169.254"],
    ],
    ids=str,
)
async def test_name_that_resolves_to_a_private_address_is_not_called(canary: Receiver, answer: list[str]) -> None:
    posted = await http.post(f"http://example.org:{canary.port}/", {}, b"{}", resolve=resolving(*answer))
    assert posted.error == "refused: the address is not public"


@pytest.mark.spec("WHK-5", "DNS rebinding has no effect: the connection goes to the address that was checked")
async def test_checked_address_is_called_without_resolving_again(
    configure: Configure, make_receiver: MakeReceiver
) -> None:
    configure(allow_hosts=["127.0.0.2/32"])
    allowed, inner = make_receiver(host="127.0.0.2"), None
    inner = make_receiver(host="127.0.0.1", port=allowed.port)
    lookups: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        lookups.append(host)
        return ["127.0.0.2"] if len(lookups) == 1 else ["127.0.0.1"]

    url = f"http://rebind.example.org:{allowed.port}/"
    assert (await http.post(url, {}, b"{}", resolve=rebinding)).status == 200
    assert lookups == ["rebind.example.org"]
    assert allowed.requests[0].headers["host"] == f"rebind.example.org:{allowed.port}"
    assert (await http.post(url, {}, b"{}", resolve=rebinding)).error.startswith("refused")
    assert inner.connections == 0


@pytest.mark.parametrize("error", [OSError("SERVFAIL"), UnicodeError("label too long"), ValueError("odd")], ids=repr)
async def test_failing_resolver_fails_the_attempt(error: Exception) -> None:
    async def failing(host: str, port: int) -> Sequence[str]:
        raise error

    posted = await http.post("http://example.org/", {}, b"{}", resolve=failing)
    assert posted.status is None
    assert posted.error.startswith("the name does not resolve")
    assert (await http.post("http://example.org/", {}, b"{}", resolve=resolving())).error.startswith(
        "the name does not"
    )


async def test_hanging_resolver_ends_by_the_deadline_and_is_queried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[str] = []
    release = threading.Event()

    def hanging(host: str, port: int) -> list[str]:
        lookups.append(host)
        release.wait(10)
        return ["127.0.0.1"]

    monkeypatch.setattr(http_client, "_getaddrinfo", hanging)
    calls = [http.post("http://slow.example.org/", {}, b"{}", deadline_seconds=0.2) for _ in range(20)]
    answers = await asyncio.gather(*calls)
    release.set()
    assert {answer.error for answer in answers} == {"no response within 0.2 s"}
    assert lookups == ["slow.example.org"]


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"]
)
def test_public_address_is_allowed(text: str) -> None:
    url_check.check_address(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/hook",
        "http://example.org",
        "https://EXAMPLE.org:8443/a?b=c&d=%2F",
        "https://xn--exmple-cua.org/",
        "https://8.8.8.8/hook",
        "https://[2606:4700::1111]:8443/hook",
        "https://a_b.example.org/",
    ],
)
def test_ordinary_url_is_accepted(url: str) -> None:
    assert url_check.check_url(url).host == url_check.check_url(url).host.lower()


def test_url_is_parsed_into_the_parts_of_the_request() -> None:
    target = url_check.check_url("https://Example.org?x=1")
    assert (target.host, target.port, target.path, target.authority) == ("example.org", 443, "/?x=1", "example.org")
    assert url_check.check_url("http://example.org:8081/a?x=1").endpoint_url == "http://example.org:8081/a"
    assert url_check.check_url("http://[2606:4700:0::1111]/").authority == "[2606:4700::1111]"


def test_allow_hosts_allows_its_networks_only(configure: Configure) -> None:
    configure(allow_hosts=["10.20.0.0/16"])
    url_check.check_url("http://10.20.3.4:8080/")
    url_check.check_url("http://[::ffff:10.20.3.4]:8081/")
    for url in ("http://10.21.0.1/", "http://127.0.0.1/", "http://169.254.169.254/"):
        with pytest.raises(InvalidRequest):
            url_check.check_url(url)


def test_allow_hosts_never_allows_metadata_services(configure: Configure) -> None:
    configure(allow_hosts=["0.0.0.0/0", "::/0"])
    for url in ("http://169.254.169.254/", "http://[fd00:ec2::254]/", "http://0.0.0.0:8081/", "http://[fe80::1]/"):
        with pytest.raises(InvalidRequest):
            url_check.check_url(url)


def test_url_of_codeq_itself_is_refused(configure: Configure) -> None:
    configure(allow_hosts=["127.0.0.0/8"])
    url_check.check_url("http://127.0.0.1:8081/")
    for url in ("http://127.0.0.1:8080/v1/codeq/tasks", "http://localhost:8080/"):
        with pytest.raises(InvalidRequest, match="codeQ itself"):
            url_check.check_url(url)


@pytest.mark.spec("WHK-5", "No task and no subscription is created with a refused URL")
@pytest.mark.parametrize("url", HOSTILE, ids=repr)
def test_hostile_url_creates_no_task_and_no_subscription(url: str) -> None:
    url = url.replace("{port}", "18181")
    body = {"command": "c", "payload": 1, "webhook": url}
    with pytest.raises((InvalidRequest, msgspec.ValidationError)):
        conversion.new_task(msgspec.json.decode(msgspec.json.encode(body), type=NewTask))
    tenant = TenantSnapshot(tid="acme0001", slug="acme")
    with pytest.raises(InvalidRequest):
        subscriptions.subscribe(tenant, "w", callback_url=url, event_types=["c"], now=datetime.now(UTC))
