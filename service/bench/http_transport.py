"""OpenAI over HTTP: streamed completions with token-id prompts, or streamed chat.

Works against any server of that API that reports usage in streams. aiohttp, because its parser is
compiled: it spends half of the CPU time that httpx spends on a streamed token, and the client often
shares its cores with the server. Knows no load pattern.
"""

import time
from typing import Any

import aiohttp
import msgspec

from service.bench.openai_chunks import ChunkReader, failure_of_response
from service.bench.sse import SseParser
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from service.security.client_tls import ClientTls

CONNECT_TIMEOUT_S = 10.0
_OK = 200


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class HttpTransport:
    """One session with as many connections as there are requests under way.

    url: without path, or ending in /v1. model: None takes the first that the server lists.
    tls: None trusts the system's authorities. Proxies and credentials of the environment are not
    used: a benchmark must know its way.
    """

    def __init__(
        self,
        url: str,
        settings: GenerationSettings,
        *,
        model: str | None = None,
        use_chat: bool = False,
        api_key: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._path = self._base + ("/chat/completions" if use_chat else "/completions")
        self._settings = settings
        self._model = model
        self._use_chat = use_chat
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ssl = True if tls is None else tls.to_ssl_context()
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> TargetInfo:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
            headers=self._headers,
            skip_auto_headers=("Accept-Encoding",),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        models = await self._list_models(self._session)
        if not models:
            raise TargetError(f"{self._base} serves no model")
        found = next((m for m in models if self._model in (None, m.id)), None)
        if found is None:
            raise TargetError(
                f"{self._base} does not serve {self._model!r}; it serves "
                + ", ".join(model.id for model in models)
            )
        self._model = found.id
        return TargetInfo(found.id, found.vocab_size, found.max_model_len)

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        if self._session is None:
            raise RuntimeError("connect() comes first")
        reader = ChunkReader(trace)
        body = msgspec.json.encode(self._body(request))
        try:
            async with self._session.post(self._path, data=body) as response:
                if response.status != _OK:
                    raise failure_of_response(response.status, await response.read())
                await _read_stream(response, reader)
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError("connect_failed", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise RequestFailedError("connection_lost", str(error)) from error
        reader.finish()

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _list_models(self, session: aiohttp.ClientSession) -> list[_Model]:
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with session.get(f"{self._base}/models", timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = str(cause) or type(error).__name__
            raise TargetError(f"no server answers at {self._base}: {reason}") from error
        if response.status != _OK:
            failure = failure_of_response(response.status, body)
            raise TargetError(f"{self._base}/models: {failure.code}: {failure.message}")
        try:
            return msgspec.json.decode(body, type=_ModelList).data
        except msgspec.DecodeError as error:
            raise TargetError(f"{self._base} is no OpenAI API: {error}") from error

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": self._settings.temperature,
            "ignore_eos": self._settings.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._settings.cache_salt:
            body["cache_salt"] = self._settings.cache_salt
        if self._use_chat:
            body["messages"] = [{"role": "user", "content": request.as_words()}]
        else:
            body["prompt"] = request.prompt_token_ids
        return body


async def _read_stream(response: aiohttp.ClientResponse, reader: ChunkReader) -> None:
    """Everything that one read of the socket brought counts as delivered then."""
    parser = SseParser()
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for data in parser.feed(chunk):
            reader.read(data, now_s)
