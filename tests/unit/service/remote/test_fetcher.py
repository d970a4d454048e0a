"""Fetching from servers that behave and from servers that do not, by real sockets."""

import asyncio
import gzip
import socket
import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from aiohttp import web

from service.errors import ApiError, ApiErrorCode
from service.remote.fetcher import HttpFetcher, NoFetcher, make_fetcher
from service.remote.settings import MediaSettings

pytestmark = pytest.mark.asyncio
FILE = b"\x89PNG" + bytes(5000)
MAX_BYTES = 10_000


class Server:
    """An HTTP server on loopback that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[web.BaseRequest] = []
        self.port = 0

    def url(self, path: str, host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        return await getattr(self, f"_{request.path.strip('/')}")(request)

    async def _file(self, request):
        return web.Response(body=FILE)

    async def _large(self, request):
        return web.Response(body=bytes(MAX_BYTES + 1))

    async def _endless(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(4096))

    async def _silent(self, request):
        await asyncio.sleep(600)

    async def _gone(self, request):
        return web.Response(status=404)

    async def _gzip(self, request):
        body = gzip.compress(bytes(1_000_000))
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async def _cookie(self, request):
        response = web.Response(body=FILE)
        response.set_cookie("a", "b")
        return response

    async def _away(self, request):
        return self._to(self.url("file", "elsewhere.test"))

    async def _back(self, request):
        return self._to("/file")

    async def _private(self, request):
        return self._to(f"http://169.254.169.254:{self.port}/file")

    async def _local(self, request):
        return self._to("file:///etc/passwd")

    async def _round(self, request):
        return self._to("/round")

    @staticmethod
    def _to(location):
        return web.Response(status=302, headers={"Location": location})


@pytest_asyncio.fixture
async def server():
    server = Server()
    runner = web.ServerRunner(web.Server(server.answer), shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    server.port = listening.getsockname()[1]
    await web.SockSite(runner, listening).start()
    yield server
    await runner.cleanup()


@asynccontextmanager
async def fetching(server, **changes):
    settings = {
        "allowed_hosts": (f"pictures.test:{server.port}",),
        "allowed_networks": ("127.0.0.0/8",),
        "fetch_timeout_s": 60.0,
        **changes,
    }
    fetcher = HttpFetcher(MediaSettings(**settings))
    try:
        yield fetcher
    finally:
        await fetcher.aclose()


@pytest.fixture(autouse=True)
def lookups(monkeypatch):
    """Every name is this machine. The names that were looked up."""
    names = []

    def look_up(host, port, family, kind):
        names.append(host)
        return [(socket.AF_INET, kind, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("service.remote.guard.socket.getaddrinfo", look_up)
    return names


async def fetch(server, path, **changes):
    async with fetching(server, **changes) as fetcher:
        (data,) = await fetcher.fetch([server.url(path)], MAX_BYTES, MAX_BYTES)
    return data


async def test_a_file_is_fetched(server, lookups):
    assert await fetch(server, "file") == FILE
    (request,) = server.asked
    assert request.headers["Accept-Encoding"] == "identity"
    assert not {"Cookie", "Authorization", "Referer"} & request.headers.keys()
    assert lookups == ["pictures.test"]


async def test_a_redirect_within_allowed_hosts_is_followed(server):
    assert await fetch(server, "back") == FILE


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("large", "more than 10000 bytes"),
        ("endless", "larger than a request may be|more than 10000 bytes"),
        ("silent", "no answer in 1 s"),
        ("gone", "its answer was 404"),
        ("away", "not fetched from 'elsewhere.test"),
        ("private", "not fetched from '169.254.169.254"),
        ("local", "http:// and https:// only"),
        ("round", "more than 2 redirects"),
    ],
)
async def test_what_a_server_may_not_do_is_told_by_name(server, path, reason):
    changes = {"fetch_timeout_s": 1.0} if path == "silent" else {}
    with pytest.raises(ApiError, match=reason) as refused:
        await fetch(server, path, **changes)
    assert (refused.value.code, refused.value.param) == (
        ApiErrorCode.INVALID_REQUEST,
        "messages.content",
    )


async def test_nothing_is_unpacked(server):
    assert (await fetch(server, "gzip")).startswith(b"\x1f\x8b")


async def test_an_address_that_is_not_public_is_not_connected_to(server):
    with pytest.raises(ApiError, match="the connection failed"):
        await fetch(server, "file", allowed_networks=())
    assert server.asked == []


async def test_a_name_that_changes_its_address_gains_nothing(server, monkeypatch):
    """What is looked up is connected to; there is no second look."""
    answers = iter(["192.0.2.1", "127.0.0.1"])

    def rebind(host, port, family, kind):
        return [(socket.AF_INET, kind, 6, "", (next(answers), port))]

    monkeypatch.setattr("service.remote.guard.socket.getaddrinfo", rebind)
    with pytest.raises(ApiError, match="cannot be fetched"):
        await fetch(server, "file", allowed_networks=("192.0.2.0/24",))
    assert server.asked == []
    assert next(answers) == "127.0.0.1"


async def test_files_of_a_request_share_a_ceiling(server):
    async with fetching(server) as fetcher:
        urls = [server.url("file")] * 2
        assert await fetcher.fetch(urls, MAX_BYTES, 2 * len(FILE)) == [FILE, FILE]
        with pytest.raises(ApiError, match="larger than a request may be"):
            await fetcher.fetch(urls, MAX_BYTES, 2 * len(FILE) - 1)


async def test_cookies_are_not_kept(server):
    async with fetching(server) as fetcher:
        for path in ("cookie", "file"):
            await fetcher.fetch([server.url(path)], MAX_BYTES, MAX_BYTES)
    assert "Cookie" not in server.asked[-1].headers


async def test_proxies_of_the_environment_are_not_taken(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await fetch(server, "file") == FILE


async def test_one_that_fails_ends_the_others(server):
    async with fetching(server, fetch_timeout_s=300.0) as fetcher:
        began_s, urls = time.monotonic(), [server.url("silent"), server.url("gone")]
        with pytest.raises(ApiError, match="404"):
            await fetcher.fetch(urls, MAX_BYTES, MAX_BYTES)
        assert time.monotonic() - began_s < 55


async def test_so_many_are_fetched_at_once(server):
    running = most = 0

    async def count(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return web.Response(body=b"x")

    server._file = count
    async with fetching(server, max_fetches_at_once=2) as fetcher:
        await fetcher.fetch([server.url("file")] * 6, MAX_BYTES, MAX_BYTES)
    assert most == 2


async def test_without_hosts_nothing_is_fetched():
    fetcher = make_fetcher(MediaSettings())
    assert isinstance(fetcher, NoFetcher)
    with pytest.raises(ApiError, match=r"media\.allowed_hosts") as refused:
        await fetcher.fetch(["https://example.com/a.png"], 1, 1)
    assert refused.value.code is ApiErrorCode.UNSUPPORTED_PARAMETER
