"""The gRPC API: tessera.v1.Inference, health and reflection on one server.

Built from injected collaborators; knows no Ray and no replica.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel, ConfigDict, Field

from service.api.errors import ApiError, ApiErrorCode
from service.api.grpc_calls import (
    AuthInterceptor,
    Context,
    SessionInterceptor,
    abort,
    stream_handler,
    unary_handler,
)
from service.api.grpc_requests import to_generation_request, to_prompt
from service.api.grpc_responses import choice_chunk, model_message, response, usage_chunk
from service.api.services import ApiServices
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.proto import inference_pb2 as pb
from service.request_log.grpc import ObservingInterceptor
from service.security.tls import TlsSettings

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH_POLL_S = 1.0


class GrpcOptions(BaseModel):
    """can_share_port: other processes of this host may listen on the same port (SO_REUSEPORT).

    is_reflection_open: reflection needs no API key. max_metadata_bytes bounds request headers.
    tls: None speaks plain text; settings must have passed TlsSettings.check().
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    can_share_port: bool = False
    is_reflection_open: bool = False
    max_metadata_bytes: int = Field(default=16 << 10, ge=1024)
    max_concurrent_calls: int = Field(default=8192, ge=1)
    tls: TlsSettings | None = None


class BoundGrpcServer(NamedTuple):
    """A server that is not started yet and the port it listens on."""

    server: grpc.aio.Server
    port: int


def build_grpc_server(
    services: ApiServices, address: str, options: GrpcOptions | None = None
) -> BoundGrpcServer:
    """Bind to `address` (host:port, port 0 takes a free one). Call inside the event loop.

    Raises RuntimeError if the address cannot be bound.
    """
    options = options or GrpcOptions()
    limits = services.models.limits
    auth = AuthInterceptor(
        services.authenticator,
        services.models.count_refusal,
        is_reflection_open=options.is_reflection_open,
    )
    server = grpc.aio.server(
        interceptors=(
            ObservingInterceptor(services.observer, f"/{SERVICE_NAME}/"),
            auth,
            SessionInterceptor(services.session_header),
        ),
        maximum_concurrent_rpcs=options.max_concurrent_calls,
        options=(
            ("grpc.so_reuseport", int(options.can_share_port)),
            ("grpc.max_receive_message_length", limits.max_grpc_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", options.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", options.max_metadata_bytes),
        ),
    )
    server.add_generic_rpc_handlers((_inference_handlers(services.models),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(services), server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    if options.tls is None:
        return BoundGrpcServer(server, server.add_insecure_port(address))
    credentials = options.tls.to_grpc_credentials()
    return BoundGrpcServer(server, server.add_secure_port(address, credentials))


class InferenceServicer:
    """The methods of tessera.v1.Inference. Each may raise ApiError."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    async def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        with self._models.counting_refusals():
            neutral = to_generation_request(request, self._models.limits, is_stream=False)
            handler = self._models.pick(neutral.model).handler
        async with await handler.start(neutral) as generation:
            results = await collect(generation)
            return response(generation.info, results, generation.usage, request)

    async def generate_stream(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        with self._models.counting_refusals():
            neutral = to_generation_request(request, self._models.limits, is_stream=True)
            handler = self._models.pick(neutral.model).handler
        async with await handler.start(neutral) as generation:
            info = generation.info
            prompt_token_ids = info.prompts[0] if request.return_prompt_token_ids else None
            async for delta in generation:
                usage = generation.usage if request.continuous_usage_stats else None
                yield choice_chunk(info, delta, usage, prompt_token_ids)
                prompt_token_ids = None
            yield usage_chunk(info, generation.usage)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        with self._models.counting_refusals():
            handler = self._models.pick(request.model).handler
            prompt = to_prompt(request, self._models.limits)
            token_ids = await handler.tokenise(prompt)
        return pb.TokenizeResponse(
            token_ids=token_ids,
            max_context_tokens=handler.model_info.max_context_len,
            tokens=handler.token_bytes(token_ids) if request.return_tokens else None,
        )

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        with self._models.counting_refusals():
            handler = self._models.pick(request.model).handler
            text = await handler.detokenise(
                list(request.token_ids), skip_special_tokens=request.skip_special_tokens
            )
        return pb.DetokenizeResponse(text=text)

    async def list_models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=map(model_message, self._models))

    async def get_model(self, request: pb.GetModelRequest) -> pb.Model:
        with self._models.counting_refusals():
            if not request.name:
                raise ApiError(ApiErrorCode.INVALID_REQUEST, "a name is required", "name")
            return model_message(self._models.find(request.name))


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 for the server and for Inference; both follow readiness."""

    def __init__(self, services: ApiServices) -> None:
        self._is_ready = services.is_ready

    async def Check(  # noqa: N802 - the method's name on the wire
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE_NAME):
            await abort(
                context, ApiError(ApiErrorCode.MODEL_NOT_FOUND, "unknown service", "service")
            )
        return self._response()

    async def Watch(  # noqa: N802 - the method's name on the wire
        self, request: health_pb2.HealthCheckRequest, context: Context
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


def _inference_handlers(models: ModelDirectory) -> "grpc.GenericRpcHandler[Any, Any]":
    servicer = InferenceServicer(models)
    counting = models.counting_refusals
    methods = {
        "Generate": unary_handler(pb.GenerateRequest, servicer.generate, counting),
        "GenerateStream": stream_handler(pb.GenerateRequest, servicer.generate_stream, counting),
        "Tokenize": unary_handler(pb.TokenizeRequest, servicer.tokenize, counting),
        "Detokenize": unary_handler(pb.DetokenizeRequest, servicer.detokenize, counting),
        "ListModels": unary_handler(pb.ListModelsRequest, servicer.list_models, counting),
        "GetModel": unary_handler(pb.GetModelRequest, servicer.get_model, counting),
    }
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)
