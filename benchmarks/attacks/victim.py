"""The attacked process: the servers of an ingress before an engine that is only a clock.

Everything between socket and backend is the service's own: connections, API keys, parsing, the
handler, event streams.
"""

import asyncio
import logging
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.attacks.target import API_KEY, Ports
from service.api.auth import make_authenticator
from service.api.grpc import GrpcOptions, build_grpc_server
from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.grpc_doorkeeper import Doorkeeper
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.deployments.departure import Departure
from service.deployments.listeners import HttpServer, bind_shared
from service.deployments.open_files import allow_connections
from service.handler.directory import ModelDirectory, ServedModel
from service.handler.handler import Handler
from service.limits import Limits
from service.observability.metrics import IngressMetrics
from service.request_context import RequestContext
from service.routing.admission import AdmissionSettings, IngressAdmission
from service.security.api_keys import ApiKey
from service.security.callers import make_callers
from tests.fakes.backend import MODEL_INFO
from tests.fakes.text import InlineTokenizer
from tests.fakes.tokenizer_folders import make_byte_level_folder
from workers.engine.protocol import FinishReason, GenerateRequest, ModelInfo, StepOutput
from workers.long_lived import settle

DRAIN_TIMEOUT_S = 60.0
KEEP_ALIVE_TIMEOUT_S = 90
NUM_TOKENS = 4
_TOKEN_ID = 5


class ClockStream:
    """A token every step_s."""

    def __init__(self, request_id: str, step_s: float) -> None:
        self._request_id = request_id
        self._step_s = step_s
        self._num_left = NUM_TOKENS

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._num_left == 0:
            raise StopAsyncIteration
        await asyncio.sleep(self._step_s)
        self._num_left -= 1
        output = StepOutput(self._request_id, [_TOKEN_ID])
        if self._num_left == 0:
            output.finish_reason = FinishReason.LENGTH
        return output

    async def aclose(self) -> None:
        self._num_left = 0


class ClockBackend:
    """Implements GenerationBackend and forgets every request."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    @property
    def info(self) -> ModelInfo:
        return MODEL_INFO

    def check_admission(self) -> None:
        """There is always room."""

    async def submit(self, request: GenerateRequest, context: RequestContext) -> ClockStream:
        return ClockStream(request.request_id, self._step_s)


def run_victim(pipe: Connection, step_s: float, is_open: bool) -> None:
    """Send Ports, serve until told to drain, send how many seconds the drain took.

    is_open: nobody needs a key.
    """
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_serve(pipe, _make_services(Path(folder), step_s, is_open)))


def _make_services(folder: Path, step_s: float, is_open: bool) -> ApiServices:
    tokenizer = InlineTokenizer(make_byte_level_folder(folder))
    metrics = IngressMetrics(CollectorRegistry())
    limits = Limits()
    backend = ClockBackend(step_s)
    handler = Handler(backend, tokenizer, tokenizer.pieces, limits, metrics, tokenizer.chats)
    served = ServedModel(MODEL_INFO.name, handler, lambda: True, MODEL_INFO.name)
    models = ModelDirectory([served], limits, metrics)
    keys = [] if is_open else [ApiKey(API_KEY, "honest")]
    callers = make_callers(keys, time.monotonic, salt_prefix_cache=False)
    return ApiServices(models, make_authenticator(callers), lambda: True, "0", 0)


async def _serve(pipe: Connection, services: ApiServices) -> None:
    allow_connections(1 << 14)
    listener = bind_shared("127.0.0.1", 0)
    http = HttpServer(build_http_app(services), KEEP_ALIVE_TIMEOUT_S, DRAIN_TIMEOUT_S)
    options = GrpcOptions()
    doorkeeper = Doorkeeper(options.connections)
    calls = CallsUnderWay()
    rpc = build_grpc_server(services, "127.0.0.1:0", options, doorkeeper=doorkeeper, calls=calls)
    await rpc.server.start()
    keeping = asyncio.create_task(doorkeeper.run())
    port = listener.getsockname()[1]
    await http.start(listener)
    settle()
    pipe.send(Ports(port, rpc.port, os.getpid()))
    await asyncio.to_thread(pipe.recv)
    started_s = time.monotonic()
    admission = IngressAdmission(AdmissionSettings())
    departure = Departure(http, rpc.server, calls, admission, lambda: 0, DRAIN_TIMEOUT_S)
    await departure.run()
    keeping.cancel()
    pipe.send(time.monotonic() - started_s)
