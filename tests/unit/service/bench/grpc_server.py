"""A tiny server of inference.proto that misbehaves on request, on a free port of this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc

OVERLOADED = 101
PLAIN_STATUS = 102
CUT_SHORT = 103


class FakeInference(pb_grpc.InferenceServicer):
    """Streams max_tokens tokens, tokens_per_chunk in each."""

    def __init__(self, tokens_per_chunk: int = 1) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.requests: list[pb.GenerateRequest] = []
        self.peers: set[str] = set()
        self.metadata: list[dict[str, str]] = []

    async def ListModels(self, request, context) -> pb.ListModelsResponse:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        model = pb.Model(name="fake", max_context_tokens=512, vocab_size=1000)
        return pb.ListModelsResponse(models=[model])

    async def GenerateStream(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.peers.add(context.peer())
        self.metadata.append(dict(context.invocation_metadata()))
        wanted = request.sampling.max_tokens
        if wanted == OVERLOADED:
            context.set_trailing_metadata((("tessera-error-code", "overloaded"),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "try later")
        if wanted == PLAIN_STATUS:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        for start in range(0, wanted, self.tokens_per_chunk):
            await asyncio.sleep(0)
            token_ids = range(start, min(start + self.tokens_per_chunk, wanted))
            yield pb.GenerateChunk(choice=pb.Choice(text="a", token_ids=token_ids))
        yield pb.GenerateChunk(choice=pb.Choice(finish_reason=pb.FINISH_REASON_LENGTH))
        if wanted != CUT_SHORT:
            num_prompt = len(request.token_ids.ids)
            usage = pb.Usage(prompt_tokens=num_prompt, completion_tokens=wanted, cached_tokens=1)
            yield pb.GenerateChunk(usage=usage)


@asynccontextmanager
async def serving(servicer: FakeInference) -> AsyncIterator[str]:
    """Serve in this event loop; yields the address."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
