"""Check of the URLs that codeQ calls, against server-side request forgery (SSRF).

Tenants choose the URLs of webhooks, so a URL is checked twice: `check_url` checks its text when the API receives it,
and `check_resolved` checks the addresses that its host name resolves to before each call. Operators choose the URLs of
key sets, which may be in a private network: `check_operator_addresses` refuses only addresses in ALWAYS_BLOCKED.
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

# `ipaddress.is_global` is not used: it is true for 64:ff9b::7f00:1, 2002:7f00:1::, 192.0.0.8 and 224.0.0.1.
BLOCKED_V4 = tuple(
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
# IPv6 is limited to the range that IANA allocates as global unicast, without its special parts: protocol assignments
# and Teredo, documentation, 6to4 (which embeds any IPv4 address), AS112.
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
BLOCKED_V6 = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"))
)
# Blocked even if `allow_hosts` contains them: cloud metadata services have addresses here, webhook receivers do not.
ALWAYS_BLOCKED = tuple(
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
# Ports of services that might interpret an HTTP request as their own protocol: the ports that browsers block, and
# those of databases and control planes.
BLOCKED_PORTS = frozenset(
    {
        1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109,
        110, 111, 113, 115, 117, 119, 123, 135, 137, 138, 139, 143, 161, 179, 389, 427, 445, 465, 512, 513, 514, 515,
        526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659,
        4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
        1433, 1521, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 4369, 5432, 5433, 5671, 5672, 5900, 5984, 6379, 6380,
        6432, 7000, 7001, 9042, 9092, 9160, 9200, 9300, 10250, 10255, 11211, 16379, 25672, 26379, 27017, 27018, 50070,
    }
)  # fmt: skip
# Names and domains that resolve in private networks only.
PRIVATE_NAMES = ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home.arpa", "corp", "home")

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.ASCII | re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


class UrlTarget(msgspec.Struct, frozen=True):
    """The parts of a URL that passed the check of its text."""

    scheme: str
    host: str  # lower case; an IPv6 address without brackets
    port: int
    path: str  # with the query string
    literal: Address | None = None  # the host, if it is an IP address

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def host_and_port(self) -> str:
        """Host and port. Circuits and slots are counted by this text."""
        return f"{self.host}:{self.port}"

    @property
    def endpoint_url(self) -> str:
        """The URL without its query string, which identifies an endpoint."""
        return f"{self.scheme}://{self.authority}{self.path.partition('?')[0]}"


class AddressRefused(Exception):
    """The URL or address must not be called."""


def check_url(url: str) -> UrlTarget:
    """Check the text of a URL without resolving its host. Raises InvalidRequest."""
    try:
        return parse(url)
    except AddressRefused as error:
        raise InvalidRequest(f"webhook: {error}") from error


def parse(url: str) -> UrlTarget:
    """Parse and check a URL. Raises AddressRefused.

    URL parsers differ on malformed URLs, which attackers use to pass a check. So malformed URLs are refused, never
    repaired.
    """
    if len(url) > URL_CHARS:
        raise AddressRefused(f"the URL is longer than {URL_CHARS} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise AddressRefused(
            "the URL may contain only visible ASCII characters and no backslash; "
            "write an international host name in its xn-- form"
        )
    match = _URL.fullmatch(url)
    if not match:
        raise AddressRefused("the URL must begin with http:// or https:// and have no fragment")
    scheme, authority, path = match[1].lower(), match[2].lower(), match[3]
    if "@" in authority:
        raise AddressRefused("the URL must not contain a user name or password")
    parts = _AUTHORITY.fullmatch(authority)
    if not parts:
        raise AddressRefused("the host is neither a host name nor an IP address")
    port = int(parts[2]) if parts[2] is not None else 443 if scheme == "https" else 80
    if not 0 < port < 65536 or port in BLOCKED_PORTS:
        raise AddressRefused(f"port {port} is not allowed")
    host, literal = _host(parts[1])
    if literal is not None:
        check_address(literal)
    elif not conf().webhooks.allow_hosts and _is_private_name(host):
        raise AddressRefused("the host name belongs to a private network")
    if _is_own_address(host, literal, port):
        raise AddressRefused("the URL points to codeQ itself")
    target = UrlTarget(scheme, host, port, path if path.startswith("/") else f"/{path}", literal)
    if scheme == "http" and conf().production and not conf().webhooks.allow_hosts:
        raise AddressRefused("the URL must begin with https://")
    return target


def _host(text: str) -> tuple[str, Address | None]:
    if text.startswith("["):
        try:
            address = ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            raise AddressRefused("the host is not a valid IPv6 address") from None
        return str(address), address
    labels = text.split(".")
    # Resolvers accept 127.1, 0x7f.1, 0177.0.0.1 and 2130706433 as addresses. This function accepts only the dotted
    # decimal form.
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        try:
            return text, ipaddress.IPv4Address(text)
        except ValueError:
            raise AddressRefused("the host is not an IPv4 address in dotted decimal form") from None
    if len(text) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressRefused("the host is not a valid host name")
    return text, None


def _is_private_name(host: str) -> bool:
    return "." not in host or any(host == name or host.endswith(f".{name}") for name in PRIVATE_NAMES)


def _is_own_address(host: str, literal: Address | None, port: int) -> bool:
    """Whether the URL points to codeQ itself.

    A callback that enqueues a task with a callback would loop for ever.
    """
    own_hosts = {name.strip("[]") for name in conf().allowed_hosts}
    if host not in own_hosts and not (literal is not None and literal.is_loopback and "127.0.0.1" in own_hosts):
        return False
    is_loopback = literal.is_loopback if literal is not None else host == "localhost"
    return port == conf().web.port or (port in (80, 443) and not is_loopback)


def check_address(address: Address) -> None:
    """Raise AddressRefused unless the address is public or `allow_hosts` allows it."""
    address = _unmap_ipv4(address)
    if not _in_any(address, ALWAYS_BLOCKED):
        if _in_any(address, _allowed_networks()):
            return
        if isinstance(address, ipaddress.IPv4Address):
            if not _in_any(address, BLOCKED_V4):
                return
        elif address in PUBLIC_V6 and not _in_any(address, BLOCKED_V6):
            return
    raise AddressRefused("the address is not public")


def check_resolved(target: UrlTarget, resolved: Iterable[Address]) -> list[Address]:
    """Check all addresses that a host name resolves to, and return them without duplicates.

    Raises AddressRefused if any of them must not be called.
    """
    addresses = list(dict.fromkeys(map(_unmap_ipv4, resolved)))
    for address in addresses:
        check_address(address)
        if target.scheme == "http" and conf().production and not _in_any(address, _allowed_networks()):
            raise AddressRefused("the URL must begin with https://")
    return addresses


def check_operator_addresses(resolved: Iterable[Address]) -> list[Address]:
    """Check the addresses of a URL that an operator chose, and return them without duplicates.

    Private networks are allowed. Raises AddressRefused for an address in ALWAYS_BLOCKED.
    """
    addresses = list(dict.fromkeys(map(_unmap_ipv4, resolved)))
    if any(_in_any(address, ALWAYS_BLOCKED) for address in addresses):
        raise AddressRefused("the address is link-local, multicast or reserved")
    return addresses


def _unmap_ipv4(address: Address) -> Address:
    """Turn ::ffff:127.0.0.1 into 127.0.0.1, which is the address that the kernel connects to."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _allowed_networks() -> tuple[Network, ...]:
    return _networks(tuple(conf().webhooks.allow_hosts))


@lru_cache(maxsize=16)
def _networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


def _in_any(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
