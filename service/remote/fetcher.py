"""Files of allowed hosts, within ceilings of size and time. Use from one event loop."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import aiohttp
from yarl import URL

from service.errors import ApiError, ApiErrorCode
from service.remote.guard import GuardedResolver, UrlGuard, UrlRefusedError
from service.remote.settings import MediaSettings

_PARAM = "messages.content"
_REDIRECTS = {301, 302, 303, 307, 308}
_CHUNK_BYTES = 64 << 10
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tessera"}


class Fetcher(Protocol):
    """Gets files by their URLs."""

    async def fetch(self, urls: Sequence[str], max_file_bytes: int, max_bytes: int) -> list[bytes]:
        """max_bytes: of all together. Raises ApiError."""
        ...

    async def aclose(self) -> None: ...


class NoFetcher:
    """Where no host is allowed."""

    async def fetch(self, urls: Sequence[str], max_file_bytes: int, max_bytes: int) -> list[bytes]:
        message = f"{_PARAM}: images are not fetched here (media.allowed_hosts); send them as data"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, _PARAM)

    async def aclose(self) -> None:
        """Holds nothing."""


def make_fetcher(settings: MediaSettings) -> Fetcher:
    return HttpFetcher(settings) if settings.allowed_hosts else NoFetcher()


class _Budget:
    """Bytes that are left for the files of one request."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises UrlRefusedError."""
        self._num_bytes -= num_bytes
        if self._num_bytes < 0:
            raise UrlRefusedError("the files are larger than a request may be")


class HttpFetcher:
    """aclose() it at the end. Takes no proxy, cookie or credential from anywhere."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings
        self._guard = UrlGuard(settings)
        self._free = asyncio.Semaphore(settings.max_fetches_at_once)
        self._resolver = GuardedResolver(self._guard)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    async def fetch(self, urls: Sequence[str], max_file_bytes: int, max_bytes: int) -> list[bytes]:
        """Raises ApiError; then nothing is under way any more."""
        budget = _Budget(max_bytes)
        tasks = [asyncio.create_task(self._fetch(url, max_file_bytes, budget)) for url in urls]
        try:
            return await asyncio.gather(*tasks)
        except UrlRefusedError as error:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, str(error), _PARAM) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, text: str, max_bytes: int, budget: _Budget) -> bytes:
        url = self._guard.check(text)
        try:
            async with asyncio.timeout(self._settings.fetch_timeout_s), self._free:
                for _ in range(self._settings.max_redirects + 1):
                    found = await self._get(url, max_bytes, budget)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError as error:
            raise _failed(url, f"no answer in {self._settings.fetch_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failed(url, "the connection failed") from error
        raise _failed(url, f"more than {self._settings.max_redirects} redirects")

    async def _get(self, url: URL, max_bytes: int, budget: _Budget) -> bytes | URL:
        """The file, or where it is."""
        session = self._open_session()
        async with session.get(url, allow_redirects=False, headers=_HEADERS) as response:
            if response.status in _REDIRECTS:
                return self._next(url, response.headers.get("Location", ""))
            if response.status != 200:
                raise _failed(url, f"its answer was {response.status}")
            if (response.content_length or 0) > max_bytes:
                raise _too_large(url, max_bytes)
            parts, num_bytes = [], 0
            async for part in response.content.iter_chunked(_CHUNK_BYTES):
                num_bytes += len(part)
                budget.take(len(part))
                if num_bytes > max_bytes:
                    raise _too_large(url, max_bytes)
                parts.append(part)
            return b"".join(parts)

    def _next(self, url: URL, location: str) -> URL:
        """Where a redirect leads, judged as a client's own URL is. Raises UrlRefusedError."""
        target = url.join(URL(location))
        if url.scheme == "https" and target.scheme != "https":
            raise _failed(url, "it leads away from https")
        return self._guard.check(str(target))

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection that is kept would outlive what its name stands for.
                connector=aiohttp.TCPConnector(
                    resolver=self._resolver,
                    use_dns_cache=False,
                    force_close=True,
                    limit=0,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


def _failed(url: URL, why: str) -> UrlRefusedError:
    return UrlRefusedError(f"the image cannot be fetched from {(url.host or '')[:64]!r}: {why}")


def _too_large(url: URL, max_bytes: int) -> UrlRefusedError:
    return _failed(url, f"it has more than {max_bytes} bytes")
