"""Which URLs are fetched, and which addresses connected to."""

import asyncio
import socket
from ipaddress import ip_address

import pytest
from pydantic import ValidationError

from service.remote.guard import AddressRefusedError, GuardedResolver, UrlGuard, UrlRefusedError
from service.remote.settings import MediaSettings

SETTINGS = MediaSettings(
    allowed_hosts=("example.com", "*.images.example", "example.com:8443", "10.1.2.3", "1.1.1.1"),
    allowed_networks=("192.168.7.0/24",),
)
GUARD = UrlGuard(SETTINGS)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "http://EXAMPLE.com./a?b=c",
        "https://example.com:8443/a",
        "https://a.b.images.example/c",
        "http://1.1.1.1/a",
    ],
)
def test_allowed_hosts_are_fetched_from(url):
    assert GUARD.check(url).path


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "http"),
        ("ftp://example.com/a", "http"),
        ("gopher://example.com/", "http"),
        ("//example.com/a", "http"),
        ("example.com/a", "http"),
        ("", "http"),
        ("https://", "http|malformed"),
        ("https://[", "malformed"),
        ("https://example.com:99999/", "malformed"),
        ("https://other.example/a", "not fetched"),
        ("https://images.example/a", "not fetched"),
        ("https://evilimages.example/a", "not fetched"),
        ("https://example.com.evil.example/a", "not fetched"),
        ("https://evil.example/#example.com", "not fetched"),
        ("https://evil.example\\@example.com/", "not fetched|malformed|name or password"),
        ("https://example.com:22/", "not fetched"),
        ("http://example.com:8080/", "not fetched"),
        ("https://example.com@evil.example/", "name or password"),
        ("https://user:pass@example.com/", "name or password"),
        ("http://10.1.2.3/", "no public address"),
        ("http://127.0.0.1/", "not fetched"),
        ("http://2130706433/", "not fetched"),
        ("http://0x7f.1/", "not fetched"),
    ],
)
def test_everything_else_is_refused(url, reason):
    with pytest.raises(UrlRefusedError, match=reason):
        GUARD.check(url)


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "198.18.0.1",
    "192.0.2.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fec0::1",
    "fd12::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::",
    "2001:db8::1",
]


@pytest.mark.parametrize("host", ["2130706433", "127.1", "127.0.1."])
def test_numbers_that_connections_take_for_addresses_are_refused_even_where_they_are_listed(host):
    """They are never looked up, so nothing else would judge them."""
    guard = UrlGuard(MediaSettings(allowed_hosts=(host.rstrip("."),)))
    with pytest.raises(UrlRefusedError, match="is no address"):
        guard.check(f"http://{host}/a.png")


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_refused(address):
    assert not GUARD.allows(ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101", "192.168.7.9"]
)
def test_public_and_listed_addresses_are_connected_to(address):
    assert GUARD.allows(ip_address(address))


def found(*addresses):
    def look_up(host, port, family, kind):
        families = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in addresses]
        return [(f, kind, 6, "", (a, port)) for f, a in zip(families, addresses, strict=True)]

    return look_up


async def resolve(monkeypatch, *addresses):
    monkeypatch.setattr("service.remote.guard.socket.getaddrinfo", found(*addresses))
    resolver = GuardedResolver(GUARD)
    try:
        return [one["host"] for one in await resolver.resolve("example.com", 443)]
    finally:
        await resolver.close()


def test_only_allowed_addresses_of_a_name_are_given_to_a_connection(monkeypatch):
    given = asyncio.run(resolve(monkeypatch, "10.0.0.1", "1.1.1.1", "fe80::1%eth0", "::1"))
    assert given == ["1.1.1.1"]


def test_a_name_without_any_is_an_error(monkeypatch):
    with pytest.raises(AddressRefusedError):
        asyncio.run(resolve(monkeypatch, "127.0.0.1", "::1"))


@pytest.mark.parametrize(
    "host", ["", "*", "https://example.com", "example.com/", "Example.com", "a b", "*.*.example"]
)
def test_settings_take_names_only(host):
    with pytest.raises(ValidationError, match="is no host"):
        MediaSettings(allowed_hosts=(host,))
