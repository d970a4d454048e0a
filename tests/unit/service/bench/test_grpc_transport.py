"""gRPC: requests as the proto wants them, tokens counted by their ids, failures by code."""

import asyncio

import pytest

from service.bench.grpc_transport import NUM_CHANNELS, GrpcTransport
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from tests.unit.service.bench import grpc_server
from tests.unit.service.bench.grpc_server import FakeInference, serving

pytestmark = pytest.mark.asyncio

SETTINGS = GenerationSettings(temperature=0.5, ignore_eos=True, cache_salt="run 1")


async def send(servicer: FakeInference, *max_tokens: int, **options) -> list[RequestTrace]:
    traces = [RequestTrace(due_s=0.0) for _ in max_tokens]
    async with serving(servicer) as address:
        transport = GrpcTransport(address, SETTINGS, **options)
        try:
            await transport.connect()
            await asyncio.gather(
                *(
                    transport.send(BenchRequest(i, [7, 8, 9], count), trace)
                    for i, (count, trace) in enumerate(zip(max_tokens, traces, strict=True))
                )
            )
        finally:
            await transport.aclose()
    return traces


async def test_tokens_are_counted_by_their_ids_and_not_by_chunks() -> None:
    (trace,) = await send(FakeInference(tokens_per_chunk=3), 10)
    assert list(trace.event_tokens) == [3, 3, 3, 1]
    assert trace.num_output_tokens == 10
    assert trace.num_input_tokens == 3
    assert trace.num_cached_tokens == 1


async def test_a_request_says_what_is_wanted() -> None:
    servicer = FakeInference()
    await send(servicer, 2, api_key="secret")
    (request,) = servicer.requests
    assert request.model == "fake"
    assert list(request.token_ids.ids) == [7, 8, 9]
    assert request.sampling.temperature == 0.5
    assert request.sampling.ignore_eos
    assert request.cache_salt == "run 1"
    assert all(metadata["authorization"] == "Bearer secret" for metadata in servicer.metadata)


async def test_requests_are_spread_over_the_connections() -> None:
    servicer = FakeInference()
    await send(servicer, *([2] * NUM_CHANNELS * 2))
    assert len(servicer.peers) == NUM_CHANNELS


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (grpc_server.OVERLOADED, "overloaded", "try later"),
        (grpc_server.PLAIN_STATUS, "grpc_internal", "broken"),
        (grpc_server.CUT_SHORT, "incomplete_stream", "without usage"),
    ],
)
async def test_every_way_to_fail_has_its_code(kind: int, code: str, message: str) -> None:
    with pytest.raises(RequestFailedError) as caught:
        await send(FakeInference(), kind)
    assert caught.value.code == code
    assert message in caught.value.message


async def test_the_target_says_what_it_is_and_what_it_does_not_serve() -> None:
    async with serving(FakeInference()) as address:
        transport = GrpcTransport(address, SETTINGS)
        assert await transport.connect() == TargetInfo("fake", 1000, 512)
        await transport.aclose()
        transport = GrpcTransport(address, SETTINGS, model="other")
        with pytest.raises(TargetError, match="'other'; it serves fake"):
            await transport.connect()
        await transport.aclose()


async def test_a_refused_connection_is_a_target_error() -> None:
    transport = GrpcTransport("127.0.0.1:1", SETTINGS)
    with pytest.raises(TargetError, match="no Tessera gRPC server answers at 127.0.0.1:1"):
        await transport.connect()
    await transport.aclose()
