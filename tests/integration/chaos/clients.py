"""One request as a client sends it, and how it ended for that client. Knows no kill.

HTTP by aiohttp, whose parser costs little; gRPC by grpc.aio. Token ids are compared, not counted.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
import grpc
import grpc.aio

from service.bench.sse import SseParser
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.integration.chaos.applications import Application, Request

NUM_GRPC_CHANNELS = 8
ERROR_CODE_KEY = "tessera-error-code"
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class Protocol(StrEnum):
    """How a request travels."""

    HTTP_STREAM = "http stream"
    HTTP_WHOLE = "http"
    GRPC_STREAM = "grpc stream"


class End(StrEnum):
    """How it ended. SILENT: well-formed, but with neither a last token nor an error."""

    WHOLE = "whole"
    WRONG = "wrong tokens"
    LEFT = "left early"
    ERROR = "typed error"
    CONNECTION = "connection lost"
    REFUSED = "connection refused"
    SILENT = "ended silently"
    TWICE = "more than one end"
    HUNG = "hung"


@dataclass(slots=True)
class Outcome:
    """Times are time.monotonic(). leave_after: tokens after which this client goes, None: never."""

    application: Application
    protocol: Protocol
    request: Request
    leave_after: int | None
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    end: End | None = None
    code: str = ""
    message: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def conclude(self, end: End, code: str = "", message: str = "") -> None:
        """The first end counts; a second one is a broken promise of its own."""
        if self.end is not None:
            end, code = End.TWICE, f"{self.end} {self.code}, then {end} {code}"
        self.end, self.code, self.message = end, code, message

    @property
    def has_left(self) -> bool:
        return self.leave_after is not None and len(self.token_ids) >= self.leave_after

    @property
    def has_crossed_a_goodbye(self) -> bool:
        """Whether gRPC itself has ended it before it began, because its server was telling clients
        to go: such a call may be sent again (test_grpc_goodbye.py, docs/operations.md)."""
        is_cancelled = self.end is End.CONNECTION and self.code == "CANCELLED"
        return self.protocol is Protocol.GRPC_STREAM and is_cancelled and not self.token_ids


class Clients:
    """Connections to one application. Use as an async context, from one event loop."""

    def __init__(self, application: Application, deadline_s: float) -> None:
        self._application = application
        self._deadline_s = deadline_s
        self._num_sent = 0

    async def __aenter__(self) -> "Clients":
        no_timeout = aiohttp.ClientTimeout(total=None)
        # Some clients keep their connections, others open one for each request.
        self._sessions = [
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=is_closed_each_time),
                timeout=no_timeout,
                skip_auto_headers=("Accept-Encoding",),
            )
            for is_closed_each_time in (False, True)
        ]
        self._channels = [
            grpc.aio.insecure_channel(self._application.grpc_address, options=_CHANNEL_OPTIONS)
            for _ in range(NUM_GRPC_CHANNELS)
        ]
        self._stubs = [pb_grpc.InferenceStub(channel) for channel in self._channels]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(one.close() for one in [*self._sessions, *self._channels]))

    async def send(self, protocol: Protocol, request: Request, leave_after: int | None) -> Outcome:
        """Never raises: whatever happens is an outcome."""
        self._num_sent += 1
        outcome = Outcome(self._application, protocol, request, leave_after)
        try:
            async with asyncio.timeout(self._deadline_s):
                if protocol is Protocol.GRPC_STREAM:
                    await self._grpc(outcome)
                else:
                    await self._http(outcome)
        except TimeoutError:
            outcome.conclude(End.HUNG)
        outcome.ended_s = time.monotonic()
        if outcome.end is None:
            outcome.conclude(End.SILENT)
        return outcome

    async def _http(self, outcome: Outcome) -> None:
        session = self._sessions[self._num_sent % len(self._sessions)]
        url = f"{self._application.url}/v1/completions"
        is_streamed = outcome.protocol is Protocol.HTTP_STREAM
        try:
            async with session.post(url, json=_body(outcome.request, is_streamed)) as answer:
                if answer.status != 200:
                    _conclude_error(outcome, json.loads(await answer.read()))
                elif is_streamed:
                    await _read_events(answer, outcome)
                else:
                    choice = json.loads(await answer.read())["choices"][0]
                    outcome.token_ids += choice["token_ids"]
                    outcome.text += choice["text"]
                    outcome.conclude(End.WHOLE)
        except aiohttp.ClientConnectorError as error:
            outcome.conclude(End.REFUSED, type(error).__name__, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.conclude(End.CONNECTION, type(error).__name__, str(error))

    async def _grpc(self, outcome: Outcome) -> None:
        stub = self._stubs[self._num_sent % len(self._stubs)]
        has_usage = False
        call = stub.GenerateStream(_message(outcome.request))
        try:
            async for chunk in call:
                has_usage = has_usage or chunk.HasField("usage")
                outcome.token_ids += chunk.choice.token_ids
                outcome.text += chunk.choice.text
                if outcome.has_left:
                    call.cancel()
                    outcome.conclude(End.LEFT)
                    return
            outcome.conclude(End.WHOLE if has_usage else End.SILENT)
        except grpc.aio.AioRpcError as error:
            code = dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY)
            if code is not None:
                outcome.conclude(End.ERROR, code, error.details() or "")
            else:
                details = error.details() or ""
                end = End.REFUSED if "Connection refused" in details else End.CONNECTION
                outcome.conclude(end, error.code().name, details)


def _body(request: Request, is_streamed: bool) -> dict:
    return {
        "model": "builtin",
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "stream": is_streamed,
        "return_token_ids": True,
        **request.sampling,
    }


def _message(request: Request) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, **request.sampling)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=request.prompt), sampling=sampling)


def _conclude_error(outcome: Outcome, body: dict) -> None:
    error = body["error"]
    outcome.conclude(End.ERROR, error["code"], error["message"])


async def _read_events(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    parser = SseParser()
    async for read in answer.content.iter_any():
        for data in parser.feed(read):
            if data == b"[DONE]":
                outcome.conclude(End.WHOLE)
                continue
            event = json.loads(data)
            if "error" in event:
                _conclude_error(outcome, event)
            for choice in event.get("choices", ()):
                outcome.token_ids += choice["token_ids"]
                outcome.text += choice["text"]
        if outcome.has_left and outcome.end is None:
            outcome.conclude(End.LEFT)
            answer.close()
            return
