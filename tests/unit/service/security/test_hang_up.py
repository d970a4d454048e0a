"""Connections of this process are found by their port and closed, and no others."""

import errno
import os
import socket

import pytest

from service.security.hang_up import connected_to, hang_up, num_open_files, parse_peer


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:80", ("127.0.0.1", 80)),
        ("ipv6:%5B::1%5D:8080", ("::1", 8080)),
        ("ipv6:[fe80::1%25eth0]:1", ("fe80::1", 1)),
        ("ipv6:[::ffff:10.0.0.1]:1", ("10.0.0.1", 1)),
        ("unix:/tmp/a:80", None),
        ("unix:", None),
    ],
)
def test_addresses_as_grpc_writes_them(peer, address):
    assert parse_peer(peer) == address


class Listener:
    def __init__(self, family, host):
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.host = host
        self.family = family
        self.accepted = []

    def connect(self):
        """A client's end and its address."""
        client = socket.create_connection((self.host, self.port), timeout=5)
        self.accepted.append(self._listener.accept()[0])
        return client, client.getsockname()[:2]

    def close(self):
        for one in (self._listener, *self.accepted):
            one.close()


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_the_chosen_connections_end_and_no_others(family, host):
    ours, other = Listener(family, host), Listener(family, host)
    pairs = [ours.connect() for _ in range(3)]
    stranger, _ = other.connect()
    addresses = [address for _, address in pairs]
    assert connected_to(ours.port) == set(addresses)
    num_files = num_open_files()
    assert hang_up(ours.port, {addresses[1]}) == 0
    assert (
        hang_up(other.port, {addresses[0]}) == 0
    )  # who is connected to another port is no other's
    assert pairs[1][0].recv(1) == b""
    for kept in (pairs[0][0], pairs[2][0], stranger):
        kept.setblocking(False)
        with pytest.raises(BlockingIOError):
            kept.recv(1)
    # Descriptors stay their owner's.
    assert num_open_files() == num_files
    assert ours.accepted[1].recv(1) == b""
    for one in (ours, other, stranger, *(client for client, _ in pairs)):
        one.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_connections_that_cannot_be_ended_for_want_of_a_file_are_counted(monkeypatch, code):
    listener = Listener(socket.AF_INET, "127.0.0.1")
    (client, address), (other, other_address) = (listener.connect() for _ in range(2))
    with monkeypatch.context() as full:
        full.setattr(os, "dup", fail_with(code))
        assert hang_up(listener.port, {address, other_address}) == 2
        assert hang_up(listener.port, set()) == 0
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    assert hang_up(listener.port, {address, other_address}) == 0
    assert client.recv(1) == other.recv(1) == b""
    for one in (listener, client, other):
        one.close()


def test_what_was_closed_meanwhile_has_been_ended(monkeypatch):
    listener = Listener(socket.AF_INET, "127.0.0.1")
    client, address = listener.connect()
    monkeypatch.setattr(os, "dup", fail_with(errno.EBADF))
    assert hang_up(listener.port, {address}) == 0
    for one in (listener, client):
        one.close()


def fail_with(code):
    def fail(_):
        raise OSError(code, os.strerror(code))

    return fail


def test_what_is_no_connection_is_passed_over(tmp_path):
    files = [os.open(tmp_path, os.O_RDONLY), *os.pipe()]
    listener = Listener(socket.AF_INET, "127.0.0.1")
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    assert connected_to(listener.port) == set()
    for file in files:
        os.close(file)
    datagram.close()
    listener.close()
