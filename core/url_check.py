"""Which addresses may be called: a tenant chose them, and they must not be turned against us.

A URL is judged twice: `check_url` looks at the text when it is registered, `judged` at what the name resolves to when
it is called.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from core.conf import conf
from core.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

URL_CHARS = 2048

# `ipaddress.is_global` is not used: it says yes to 64:ff9b::7f00:1, 2002:7f00:1::, 192.0.0.8 and 224.0.0.1.
CLOSED_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24",
            "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
            "224.0.0.0/4", "240.0.0.0/4",
        ),
    )
)  # fmt: skip
# Of IPv6, only what IANA has given out as global unicast, without the parts that stand for something else:
# protocol assignments and Teredo, documentation, 6to4 (any IPv4 address in disguise), AS112.
OPEN_V6 = ipaddress.IPv6Network("2000::/3")
CLOSED_V6 = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"))
)
# Not to be opened by any setting: the metadata services of clouds live here, and nobody's receiver does.
NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "::/128",
            "fe80::/10",
            "fd00:ec2::/32",
            "ff00::/8",
        ),
    )
)
# Ports on which something listens that would take an HTTP request for its own protocol: the list browsers keep,
# and the stores and control planes that it does not know.
CLOSED_PORTS = frozenset(
    {
        1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109,
        110, 111, 113, 115, 117, 119, 123, 135, 137, 138, 139, 143, 161, 179, 389, 427, 445, 465, 512, 513, 514, 515,
        526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659,
        4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
        1433, 1521, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 4369, 5432, 5433, 5671, 5672, 5900, 5984, 6379, 6380,
        6432, 7000, 7001, 9042, 9092, 9160, 9200, 9300, 10250, 10255, 11211, 16379, 25672, 26379, 27017, 27018, 50070,
    }
)  # fmt: skip
# Names that mean something inside a network and nothing outside of it.
INNER_NAMES = ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home.arpa", "corp", "home")

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.ASCII | re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


class Target(msgspec.Struct, frozen=True):
    """Where a URL leads, after it was judged by its text."""

    scheme: str
    host: str  # lower case; an IPv6 address without its brackets
    port: int
    path: str  # with the query
    literal: Address | None = None

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def place(self) -> str:
        """Host and port: what is slow or down together."""
        return f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The URL without its query: what is one receiver, however its calls differ."""
        return f"{self.scheme}://{self.authority}{self.path.partition('?')[0]}"


class Refused(Exception):
    """The address may not be called."""


def check_url(url: str) -> Target:
    """Judge a URL by its text, without asking a resolver: InvalidRequest says what is wrong with it."""
    try:
        return parse(url)
    except Refused as error:
        raise InvalidRequest(f"webhook: {error}") from error


def parse(url: str) -> Target:
    """The target of a URL, or Refused. Strict where parsers differ: what is odd is refused, not repaired."""
    if len(url) > URL_CHARS:
        raise Refused(f"longer than {URL_CHARS} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise Refused("visible ASCII only, without backslash; write an international name in its xn-- form")
    match = _URL.fullmatch(url)
    if not match:
        raise Refused("not an http:// or https:// URL without fragment")
    scheme, authority, path = match[1].lower(), match[2].lower(), match[3]
    if "@" in authority:
        raise Refused("a user name or password does not belong into it")
    parts = _AUTHORITY.fullmatch(authority)
    if not parts:
        raise Refused("not a host name or address")
    port = int(parts[2]) if parts[2] is not None else 443 if scheme == "https" else 80
    if not 0 < port < 65536 or port in CLOSED_PORTS:
        raise Refused(f"port {port} is not one for webhooks")
    host, literal = _host(parts[1])
    if literal is not None:
        check_address(literal)
    elif not conf().webhooks.allow_hosts and _is_inner(host):
        raise Refused("the host is a name of an inner network")
    if _is_ours(host, literal, port):
        raise Refused("this is codeQ itself")
    target = Target(scheme, host, port, path if path.startswith("/") else f"/{path}", literal)
    if scheme == "http" and conf().production and not conf().webhooks.allow_hosts:
        raise Refused("https:// only")
    return target


def _host(text: str) -> tuple[str, Address | None]:
    if text.startswith("["):
        try:
            address = ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            raise Refused("not an IPv6 address") from None
        return str(address), address
    labels = text.split(".")
    # Resolvers read 127.1, 0x7f.1, 0177.0.0.1 and 2130706433 as addresses; only the plain form passes here.
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        try:
            return text, ipaddress.IPv4Address(text)
        except ValueError:
            raise Refused("not an IPv4 address in its usual form") from None
    if len(text) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise Refused("not a host name")
    return text, None


def _is_inner(host: str) -> bool:
    return "." not in host or any(host == name or host.endswith(f".{name}") for name in INNER_NAMES)


def _is_ours(host: str, literal: Address | None, port: int) -> bool:
    """Our own front door: a callback that makes a task that calls back would go round for ever."""
    ours = {name.strip("[]") for name in conf().allowed_hosts}
    if host not in ours and not (literal is not None and literal.is_loopback and "127.0.0.1" in ours):
        return False
    is_loopback = literal.is_loopback if literal is not None else host == "localhost"
    return port == conf().web.port or (port in (80, 443) and not is_loopback)


def check_address(address: Address) -> None:
    """Refused, unless the address is public or in a network that the settings open."""
    address = _unwrapped(address)
    if not _in_any(address, NEVER):
        if _in_any(address, _opened()):
            return
        if isinstance(address, ipaddress.IPv4Address):
            if not _in_any(address, CLOSED_V4):
                return
        elif address in OPEN_V6 and not _in_any(address, CLOSED_V6):
            return
    raise Refused("the address is not a public one")


def judged(target: Target, found: Iterable[Address]) -> list[Address]:
    """What a target's name resolves to, all of it judged: one address that may not be called condemns the name."""
    addresses = list(dict.fromkeys(map(_unwrapped, found)))
    for address in addresses:
        check_address(address)
        if target.scheme == "http" and conf().production and not _in_any(address, _opened()):
            raise Refused("https:// only")
    return addresses


def _unwrapped(address: Address) -> Address:
    """::ffff:127.0.0.1 is 127.0.0.1 to the kernel that connects, so it is here."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _opened() -> tuple[Network, ...]:
    return _networks(tuple(conf().webhooks.allow_hosts))


@lru_cache(maxsize=16)
def _networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


def _in_any(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
