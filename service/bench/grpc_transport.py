"""gRPC: GenerateStream with token-id prompts, tokens counted by the ids in each chunk.

Knows inference.proto as any client does. Knows no load pattern.
"""

import time
from collections.abc import Iterable, Sequence
from typing import cast

import grpc
import grpc.aio

from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.client_tls import ClientTls

CONNECT_TIMEOUT_S = 10.0
ERROR_CODE_KEY = "tessera-error-code"

# Ingresses that share a port get whole connections; with several, each gets its part of the load.
NUM_CHANNELS = 8
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class GrpcTransport:
    """NUM_CHANNELS connections, requests dealt to them in turn.

    address: host:port or unix:path. model: None takes the first that the server lists. tls: None
    speaks plain text.
    """

    def __init__(
        self,
        address: str,
        settings: GenerationSettings,
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._address = address
        self._settings = settings
        self._model = model
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._credentials = None if tls is None else tls.to_grpc_credentials()
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[pb_grpc.InferenceStub] = []

    async def connect(self) -> TargetInfo:
        for _ in range(NUM_CHANNELS):
            channel = self._open_channel()
            self._channels.append(channel)
            self._stubs.append(pb_grpc.InferenceStub(channel))  # type: ignore[no-untyped-call]
        models = await self._list_models()
        if not models:
            raise TargetError(f"{self._address} serves no model")
        found = next((m for m in models if self._model in (None, m.name)), None)
        if found is None:
            raise TargetError(
                f"{self._address} does not serve {self._model!r}; it serves "
                + ", ".join(model.name for model in models)
            )
        self._model = found.name
        return TargetInfo(found.name, found.vocab_size or None, found.max_context_tokens or None)

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        stub = self._stubs[request.index % len(self._stubs)]
        has_usage = False
        try:
            async for chunk in stub.GenerateStream(self._message(request), metadata=self._metadata):
                if chunk.HasField("usage"):
                    has_usage = True
                    trace.num_input_tokens = chunk.usage.prompt_tokens
                    trace.num_output_tokens = chunk.usage.completion_tokens
                    trace.num_cached_tokens = chunk.usage.cached_tokens
                elif chunk.choice.token_ids:
                    trace.add_event(time.perf_counter(), len(chunk.choice.token_ids))
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        if not has_usage:
            raise RequestFailedError("incomplete_stream", "the stream ended without usage")

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    def _open_channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        return grpc.aio.secure_channel(self._address, self._credentials, options=_OPTIONS)

    async def _list_models(self) -> Sequence[pb.Model]:
        try:
            response = await self._stubs[0].ListModels(
                pb.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            failure = _failure(error)
            raise TargetError(
                f"no Tessera gRPC server answers at {self._address}: "
                f"{failure.code}: {failure.message}"
            ) from error
        models: Sequence[pb.Model] = response.models
        return models

    def _message(self, request: BenchRequest) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=self._model,
            token_ids=pb.TokenIds(ids=request.prompt_token_ids),
            sampling=pb.SamplingParams(
                temperature=self._settings.temperature,
                max_tokens=request.max_tokens,
                ignore_eos=self._settings.ignore_eos,
            ),
            cache_salt=self._settings.cache_salt,
        )


def _failure(error: grpc.aio.AioRpcError) -> RequestFailedError:
    """The server's own code where it sent one, else the name of the gRPC status."""
    trailers = cast(Iterable[tuple[str, str]], error.trailing_metadata() or ())
    code = dict(trailers).get(ERROR_CODE_KEY, f"grpc_{error.code().name.lower()}")
    return RequestFailedError(code, error.details() or "")
