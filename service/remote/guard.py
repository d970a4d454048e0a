"""Which URLs may be fetched, and which addresses connected to. Knows no HTTP.

A name is looked up once, by the connection that is made: what is checked is what is connected to,
so that a name whose address changes in between (DNS rebinding) gains nothing.
"""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from service.remote.settings import MediaSettings

Address = IPv4Address | IPv6Address
_MAX_LOOKUPS = 8


class UrlRefusedError(Exception):
    """The message may go to a client."""


class AddressRefusedError(OSError):
    """A name has no address that may be connected to."""


class UrlGuard:
    """What the operator allows."""

    def __init__(self, settings: MediaSettings) -> None:
        self._hosts = frozenset(h for h in settings.allowed_hosts if not h.startswith("*."))
        self._suffixes = tuple(h[1:] for h in settings.allowed_hosts if h.startswith("*."))
        self._networks = settings.allowed_networks

    def check(self, text: str) -> URL:
        """Raises UrlRefusedError."""
        try:
            url = URL(text)
            host, port, scheme = url.host, url.port, url.scheme
        except ValueError as error:
            raise UrlRefusedError("the URL is malformed") from error
        if scheme not in ("http", "https") or not host:
            raise UrlRefusedError("images are fetched from http:// and https:// only")
        if url.user is not None or url.password is not None:
            raise UrlRefusedError("a URL with a name or password is not fetched")
        name = host.lower().rstrip(".")
        if not self._is_allowed(name if url.is_default_port() else f"{name}:{port}"):
            raise UrlRefusedError(
                f"images are not fetched from {name[:64]!r} (media.allowed_hosts)"
            )
        self._check_literal(name)
        return url

    def allows(self, address: Address) -> bool:
        """Whether it is public, or the operator says so."""
        inner = _inner(address)
        if any(inner in network for network in self._networks if network.version == inner.version):
            return True
        is_for_all = not (inner.is_multicast or inner.is_reserved or _is_site_local(inner))
        return inner.is_global and is_for_all

    def _is_allowed(self, name: str) -> bool:
        return name in self._hosts or name.endswith(self._suffixes or ("\0",))

    def _check_literal(self, name: str) -> None:
        """An address in the URL is never looked up, and neither is a number that stands for one, as
        2130706433 does for 127.0.0.1."""
        try:
            address = ip_address(name.strip("[]").partition("%")[0])
        except ValueError:
            if name.replace(".", "").isdigit():
                raise UrlRefusedError(f"{name[:64]!r} is no address") from None
            return
        if not self.allows(address):
            raise UrlRefusedError(f"{name[:64]!r} is no public address (media.allowed_networks)")


class GuardedResolver(AbstractResolver):
    """Gives a connection only addresses that the guard allows. In threads of its own: a name that
    takes long to be found must not keep bodies from being parsed."""

    def __init__(self, guard: UrlGuard) -> None:
        self._guard = guard
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, "tessera-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM
        )
        addresses = [(family, str(sockaddr[0])) for family, _, _, _, sockaddr in found]
        allowed = self._allowed(addresses)
        if not allowed:
            raise AddressRefusedError(f"{host} has no address that may be connected to")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=family,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for family, address in allowed
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _allowed(
        self, addresses: Sequence[tuple[socket.AddressFamily, str]]
    ) -> list[tuple[socket.AddressFamily, str]]:
        return [
            one for one in addresses if self._guard.allows(ip_address(one[1].partition("%")[0]))
        ]


def _inner(address: Address) -> Address:
    """An IPv4 address that an IPv6 one stands for: it is where packets may end."""
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address.sixtofour or _nat64(address) or address
    return address


def _is_site_local(address: Address) -> bool:
    """fec0::/10: given up by RFC 3879, routed inside some networks all the same."""
    return isinstance(address, IPv6Address) and address.is_site_local


def _nat64(address: IPv6Address) -> IPv4Address | None:
    """Of 64:ff9b::/96 (RFC 6052)."""
    prefix, inner = divmod(int(address), 1 << 32)
    return IPv4Address(inner) if prefix == 0x64FF9B << 64 else None
