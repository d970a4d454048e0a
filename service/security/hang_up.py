"""Closes TCP connections of this process that a library accepted and keeps to itself.

The library sees what it sees when a client leaves. Knows no protocol.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Set
from urllib.parse import unquote

_OPEN_FILES = "/dev/fd"

NO_FILE_LEFT = (errno.EMFILE, errno.ENFILE)
"""Of an OSError: the process, or its machine, has as many files as it may."""

Address = tuple[str, int]
"""Of the other end: IP address without a scope, an IPv4 one written as such, and port."""


def num_open_files() -> int:
    """Of this process. Takes no look at any of them."""
    return len(os.listdir(_OPEN_FILES))


def parse_peer(peer: str) -> Address | None:
    """An address as gRPC writes it, ipv4:HOST:PORT or ipv6:[HOST]:PORT; None for any other."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _canonical(host.strip("[]")), int(port)


def connected_to(port: int) -> set[Address]:
    """Who is connected to that port of this process."""
    return {address for address, _ in _connections(port)}


def hang_up(port: int, addresses: Set[Address]) -> int:
    """End these connections to that port, for both directions.

    That takes a file for a moment. Returns how many go on because there was none.
    """
    return sum(
        not _shut_down(descriptor, port, address)
        for address, descriptor in _connections(port)
        if address in addresses
    )


def _connections(port: int) -> Iterator[tuple[Address, int]]:
    for name in os.listdir(_OPEN_FILES):
        address = _other_end(int(name), port)
        if address is not None:
            yield address, int(name)


def _other_end(descriptor: int, port: int) -> Address | None:
    """None if this is no connection to that port; the file may be closed at any time."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if borrowed.getsockname()[1] != port:
            return None
        host, its_port = borrowed.getpeername()[:2]
        return _canonical(host), its_port
    except OSError:
        return None  # a listener, or its client has just gone
    finally:
        borrowed.detach()


def _shut_down(descriptor: int, port: int, address: Address) -> bool:
    """False if there is no file left, which it takes."""
    try:
        own = os.dup(descriptor)
    except OSError as error:
        return error.errno not in NO_FILE_LEFT  # else it has been closed meanwhile
    # The number may have become another file's; what `own` is does not change any more.
    if _other_end(own, port) != address:
        os.close(own)
        return True
    with socket.socket(fileno=own) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return True  # its client was faster
    return True


def _canonical(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
