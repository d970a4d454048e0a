"""The gRPC API: tessera.v1.Inference, health and reflection on one server.

Built from injected collaborators; knows no Ray and no replica.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel, ConfigDict, Field

from service.api.grpc_bytes import embed_bytes, response_bytes, tokenize_bytes
from service.api.grpc_calls import Call, CallInterceptor, Method, MethodHandlers, Rpc, abort
from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.grpc_doorkeeper import Doorkeeper
from service.api.grpc_replies import choice_chunk, model_message, score_message, usage_chunk
from service.api.grpc_requests import (
    to_embedding_request,
    to_generation_request,
    to_prompt,
    to_scored_texts,
    to_scoring_request,
)
from service.api.grpc_side_streams import SideStreamInterceptor
from service.api.services import ApiServices
from service.errors import ApiError, ApiErrorCode
from service.handler.best import best_of
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.handler.embedding import naming
from service.handler.generation import Generation
from service.handler.scoring import scores_of
from service.observability.request_log.record import RequestRecord
from service.proto import inference_pb2 as pb
from service.security.connections import GrpcConnectionLimits
from service.security.tls import GrpcTls

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH_POLL_S = 1.0
# A chat up to here is read in a few milliseconds, whatever it holds.
_MAX_INLINE_CHAT_BYTES = 4 << 10

T = TypeVar("T")


class GrpcOptions(BaseModel):
    """can_share_port: other processes of this host may listen on the same port (SO_REUSEPORT).

    is_reflection_open: reflection needs no API key. max_metadata_bytes bounds request headers.
    max_concurrent_calls: of the service's own methods.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    can_share_port: bool = False
    is_reflection_open: bool = False
    max_metadata_bytes: int = Field(default=16 << 10, ge=1024)
    max_concurrent_calls: int = Field(default=8192, ge=1)
    connections: GrpcConnectionLimits = GrpcConnectionLimits()


class BoundGrpcServer(NamedTuple):
    """A server that is not started yet and the port it listens on."""

    server: grpc.aio.Server
    port: int


def build_grpc_server(
    services: ApiServices,
    address: str,
    options: GrpcOptions | None = None,
    tls: GrpcTls | None = None,
    doorkeeper: Doorkeeper | None = None,
    calls: CallsUnderWay | None = None,
) -> BoundGrpcServer:
    """Bind to `address` (host:port, port 0 takes a free one). Call inside the event loop.

    tls: None speaks plain text. doorkeeper: for its owner to run; without one no connection is
    closed for the sake of others. calls: learns of all of known callers. Raises RuntimeError if the
    address cannot be bound.
    """
    options = options or GrpcOptions()
    doorkeeper = doorkeeper or Doorkeeper(options.connections)
    limits = services.models.limits
    server = grpc.aio.server(
        interceptors=(
            CallInterceptor(
                services,
                options.connections,
                doorkeeper,
                CallsUnderWay() if calls is None else calls,
                is_reflection_open=options.is_reflection_open,
            ),
            SideStreamInterceptor(options.connections, doorkeeper),
        ),
        # Side streams have places of their own, those that are just being ended included.
        maximum_concurrent_rpcs=(
            options.max_concurrent_calls + 2 * options.connections.max_side_streams
        ),
        options=(
            ("grpc.so_reuseport", int(options.can_share_port)),
            ("grpc.max_receive_message_length", limits.max_grpc_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", options.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", options.max_metadata_bytes),
            *options.connections.to_grpc_options(),
        ),
    )
    server.add_generic_rpc_handlers((_inference_handlers(services.models),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(services), server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    if tls is None:
        doorkeeper.port = server.add_insecure_port(address)
    else:
        doorkeeper.port = server.add_secure_port(address, tls.credentials)
    return BoundGrpcServer(server, doorkeeper.port)


class InferenceServicer:
    """The methods of tessera.v1.Inference. Each writes its answers and may raise ApiError."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    async def generate(self, request: pb.GenerateRequest, call: Call) -> None:
        async with await self._start(request, call, is_stream=False) as generation:
            results = best_of(await collect(generation), generation.request)
            info, usage = generation.info, generation.usage
            await call.write_bytes(await response_bytes(info, results, usage, request))

    async def generate_stream(self, request: pb.GenerateRequest, call: Call) -> None:
        async with await self._start(request, call, is_stream=True) as generation:
            info = generation.info
            prompt_token_ids = info.prompts[0] if request.return_prompt_token_ids else None
            async with aclosing(aiter(generation)) as deltas:
                async for delta in deltas:
                    usage = generation.usage if request.continuous_usage_stats else None
                    await call.write(choice_chunk(info, delta, usage, prompt_token_ids))
                    prompt_token_ids = None
            await call.write(usage_chunk(info, generation.usage))

    async def embed(self, request: pb.EmbedRequest, call: Call) -> None:
        neutral = to_embedding_request(request, call.context.record.request_id)
        handler = self._models.pick(neutral.model, call.context.record)
        with naming("input"):
            started = await handler.start(neutral, call.context, call.lease)
        async with started as generation:
            results = await collect(generation)
            info, usage = generation.info, generation.usage
            await call.write_bytes(await embed_bytes(info, results, usage))

    async def score(self, request: pb.ScoreRequest, call: Call) -> None:
        texts = to_scored_texts(request)
        record = call.context.record
        handler = self._models.pick(request.model, record)
        info = handler.model_info
        neutral = to_scoring_request(request, texts, info, record.request_id)
        with naming(texts.param):
            started = await handler.start(neutral, call.context, call.lease)
        async with started as generation:
            scores = await scores_of(texts, info, await collect(generation))
            await call.write(score_message(generation.info, scores, generation.usage))

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> None:
        handler = self._models.pick(request.model, call.context.record)
        prompt = await _read(request, lambda: to_prompt(request, self._models.limits))
        token_ids = await handler.tokenise(prompt, call.context)
        token_bytes = handler.token_bytes if request.return_tokens else None
        max_context_tokens = handler.model_info.max_request_len
        await call.write_bytes(await tokenize_bytes(token_ids, max_context_tokens, token_bytes))

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> None:
        handler = self._models.pick(request.model, call.context.record)
        text = await handler.detokenise(
            request.token_ids, call.context, skip_special_tokens=request.skip_special_tokens
        )
        await call.write(pb.DetokenizeResponse(text=text))

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> None:
        await call.write(pb.ListModelsResponse(models=map(model_message, self._models.every())))

    async def get_model(self, request: pb.GetModelRequest, call: Call) -> None:
        if not request.name:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "a name is required", "name")
        await call.write(model_message(self._models.find(request.name)))

    async def _start(
        self, request: pb.GenerateRequest, call: Call, *, is_stream: bool
    ) -> Generation:
        limits = self._models.limits
        neutral = await _read(
            request, lambda: to_generation_request(request, limits, is_stream=is_stream)
        )
        handler = self._models.pick(neutral.model, call.context.record)
        return await handler.start(neutral, call.context, call.lease)


async def _read(request: pb.GenerateRequest | pb.TokenizeRequest, read: Callable[[], T]) -> T:
    """What read makes of the request; of a large chat beside the loop, which others wait for."""
    if request.chat.ByteSize() <= _MAX_INLINE_CHAT_BYTES:
        return read()
    return await asyncio.to_thread(read)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 for the server and for Inference; both follow readiness."""

    def __init__(self, services: ApiServices) -> None:
        self._is_ready = services.is_ready

    async def Check(  # noqa: N802 - the method's name on the wire
        self, request: health_pb2.HealthCheckRequest, context: Rpc
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE_NAME):
            error = ApiError(ApiErrorCode.MODEL_NOT_FOUND, "unknown service", "service")
            await abort(context, error, RequestRecord())
        return self._response()

    async def Watch(  # noqa: N802 - the method's name on the wire
        self, request: health_pb2.HealthCheckRequest, context: Rpc
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if request.service not in ("", SERVICE_NAME):
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            yield health_pb2.HealthCheckResponse(status=status)
            return
        last = None
        while True:
            current = self._response()
            if current != last:
                last = current
                yield current
            await asyncio.sleep(_HEALTH_POLL_S)

    def _response(self) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if self._is_ready() else kinds.NOT_SERVING)


def _inference_handlers(models: ModelDirectory) -> MethodHandlers:
    servicer = InferenceServicer(models)
    ids = models.limits.max_prompt_tokens
    methods: dict[str, Method[Any]] = {
        "Generate": Method(pb.GenerateRequest, servicer.generate, ids, is_generation=True),
        "GenerateStream": Method(
            pb.GenerateRequest, servicer.generate_stream, ids, is_generation=True
        ),
        "Embed": Method(pb.EmbedRequest, servicer.embed, ids, is_generation=True),
        "Score": Method(pb.ScoreRequest, servicer.score, ids, is_generation=True),
        "Tokenize": Method(pb.TokenizeRequest, servicer.tokenize, ids),
        "Detokenize": Method(pb.DetokenizeRequest, servicer.detokenize, ids),
        "ListModels": Method(pb.ListModelsRequest, servicer.list_models, ids, is_counted=False),
        "GetModel": Method(pb.GetModelRequest, servicer.get_model, ids, is_counted=False),
    }
    return MethodHandlers(SERVICE_NAME, methods)
