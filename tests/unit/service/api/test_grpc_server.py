"""The gRPC API with a stock client on a real port: answers, errors, keys, health, reflection."""

import asyncio
import dataclasses

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from service.api.auth import make_authenticator
from service.api.grpc import SERVICE_NAME, GrpcOptions, build_grpc_server
from service.api.grpc_requests import to_prompt
from service.api.grpc_status import GRPC_STATUS
from service.errors import ApiError, ApiErrorCode
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.callers import callers_of
from tests.fakes.text import ANSWER
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio
KEY = {"authorization": "Bearer secret"}


class Connector:
    """Starts servers with changed services or options and gives channels to them."""

    def __init__(self, services):
        self.services = services
        self.opened = []
        self.address = ""

    async def __call__(self, options=None, **changes):
        changed = dataclasses.replace(self.services, **changes)
        server, port = build_grpc_server(changed, "127.0.0.1:0", options)
        await server.start()
        self.address = f"127.0.0.1:{port}"
        channel = grpc.aio.insecure_channel(self.address)
        self.opened.append((server, channel))
        return channel


@pytest_asyncio.fixture
async def connect(services):
    connector = Connector(services)
    yield connector
    for server, channel in connector.opened:
        await channel.close()
        await server.stop(None)


@pytest_asyncio.fixture
async def stub(connect):
    return pb_grpc.InferenceStub(await connect())


def _request(text="hello", **fields):
    sampling = fields.pop("sampling", pb.SamplingParams(max_tokens=50))
    return pb.GenerateRequest(text=pb.Text(text=text), sampling=sampling, **fields)


async def _error(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    metadata = dict(raised.value.trailing_metadata())
    return raised.value.code(), metadata.get("tessera-error-code"), metadata


async def _all(stream):
    return [chunk async for chunk in stream]


async def test_unary_and_stream_give_the_same_text_and_usage(stub):
    whole = await stub.Generate(_request())
    chunks = [chunk async for chunk in stub.GenerateStream(_request())]
    assert whole.choices[0].text == ANSWER
    assert "".join(chunk.choice.text for chunk in chunks) == ANSWER
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choice.finish_reason == pb.FINISH_REASON_STOP
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": pb.Text(text="hello")},
        {"chat": pb.Chat(messages=[pb.Message(role="user", content="hello")])},
        {"token_ids": pb.TokenIds(ids=[5, 6, 7])},
    ],
)
async def test_every_kind_of_prompt(stub, bench, prompt):
    answer = await stub.Generate(pb.GenerateRequest(**prompt))
    assert answer.choices[0].text == ANSWER
    expected = len(bench.backend.requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens == expected


async def test_parameters_reach_the_engine_and_unset_ones_keep_their_defaults(stub, bench):
    sampling = pb.SamplingParams(
        temperature=0, top_k=3, seed=-1, logit_bias={7: -2.5}, stop_token_ids=[9], logprobs=2,
        max_tokens=4,
    )  # fmt: skip
    answer = await stub.Generate(_request(sampling=sampling, n=2, cache_salt="x"))
    request = bench.backend.requests[1]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 3)
    assert (request.sampling.seed, request.sampling.logit_bias) == (0, {7: -2.5})
    assert (request.sampling.top_p, request.sampling.min_tokens) == (1.0, 0)
    assert request.cache_salt == "x"
    assert len(answer.choices) == 2
    assert [len(entry.top) for entry in answer.choices[0].logprobs] == [2] * 4
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_LENGTH


async def test_echo_scores_a_prompt(stub):
    sampling = pb.SamplingParams(max_tokens=0, logprobs=0)
    answer = await stub.Generate(_request("hello", sampling=sampling, echo=True))
    entries = answer.choices[0].logprobs
    assert answer.choices[0].text == "hello"
    assert not entries[0].HasField("logprob")
    assert b"".join(entry.token for entry in entries) == b"hello"


async def test_a_stop_string_is_named(stub):
    answer = await stub.Generate(_request(sampling=pb.SamplingParams(stop=["world"])))
    assert answer.choices[0].text == "hello "
    assert answer.choices[0].stop_string == "world"


async def test_tokenize_and_detokenize_are_inverse(stub):
    tokens = await stub.Tokenize(pb.TokenizeRequest(text=pb.Text(text="naïve 🙂")))
    assert tokens.max_context_tokens == 512
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == "naïve 🙂"


async def test_the_tokens_of_a_prompt_are_told_on_request(stub, bench):
    request = _request(return_prompt_token_ids=True)
    whole = await stub.Generate(request)
    chunks = await _all(stub.GenerateStream(request))
    expected = bench.backend.requests[0].prompt_token_ids
    assert list(whole.prompt_token_ids) == expected
    assert [list(chunk.prompt_token_ids) for chunk in chunks] == [expected] + [[]] * (
        len(chunks) - 1
    )
    assert not (await stub.Generate(_request())).prompt_token_ids
    tokenize = pb.TokenizeRequest(text=pb.Text(text="hello"), return_tokens=True)
    assert b"".join((await stub.Tokenize(tokenize)).tokens) == b"hello"


async def test_usage_so_far_grows_to_the_whole_usage(stub):
    chunks = await _all(stub.GenerateStream(_request(continuous_usage_stats=True)))
    counts = [chunk.usage_so_far.completion_tokens for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert chunks[-2].usage_so_far == chunks[-1].usage
    plain = await _all(stub.GenerateStream(_request()))
    assert not any(chunk.HasField("usage_so_far") for chunk in plain)


async def test_a_chat_may_ask_for_the_tokens_that_the_tokenizer_adds():
    for adds in (False, True):
        messages = [pb.Message(role="user", content="hello")]
        chat = pb.Chat(messages=messages, add_special_tokens=adds)
        assert to_prompt(pb.GenerateRequest(chat=chat), Limits()).add_special_tokens is adds


FLOODS = {
    "messages": pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message()] * 5000)),
    "stop": _request(sampling=pb.SamplingParams(stop=["x"] * 5000)),
    "logit_bias": _request(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(5000), 0))),
}


@pytest.mark.parametrize("field", list(FLOODS))
async def test_floods_of_items_are_refused_before_they_are_looked_at(stub, field):
    code, error_code, metadata = await _error(stub.Generate(FLOODS[field]))
    assert (code, error_code) == (grpc.StatusCode.INVALID_ARGUMENT, "limit_exceeded")
    assert metadata["tessera-error-param"] == field


async def test_a_flood_of_unknown_fields_is_refused(connect):
    call = (await connect()).unary_unary(f"/{SERVICE_NAME}/Generate")
    code, error_code, _ = await _error(call(b"\xf8\x7f\x01" * 2_000_000))
    assert (code, error_code) == (grpc.StatusCode.INVALID_ARGUMENT, "unknown_parameter")


async def test_models(stub):
    models = await stub.ListModels(pb.ListModelsRequest())
    assert [(model.name, model.task) for model in models.models] == [("tiny", "generate")]
    assert await stub.GetModel(pb.GetModelRequest(name="tiny")) == models.models[0]
    status, code, _ = await _error(stub.GetModel(pb.GetModelRequest(name="other")))
    assert (status, code) == (grpc.StatusCode.NOT_FOUND, "model_not_found")


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.GenerateRequest(), "invalid_request", "prompt"),
        (_request(model="other"), "model_not_found", "model"),
        (_request(n=0), "limit_exceeded", "n"),
        (_request(sampling=pb.SamplingParams(max_tokens=0)), "invalid_request", "max_tokens"),
        (_request(sampling=pb.SamplingParams(top_p=0)), "invalid_request", "top_p"),
        (
            _request(sampling=pb.SamplingParams(temperature=float("nan"))),
            "invalid_request",
            "temperature",
        ),
        (_request(sampling=pb.SamplingParams(seed=-(2**63))), "invalid_request", "seed"),
        (_request(sampling=pb.SamplingParams(stop=[""])), "invalid_request", "stop"),
        (_request(sampling=pb.SamplingParams(logprobs=21)), "limit_exceeded", "logprobs"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="robot", content="x")])),
            "invalid_request",
            "messages.role",
        ),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.Message(role="user")], template_kwargs_json="[1]")
            ),
            "invalid_request",
            "template_kwargs_json",
        ),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.Message(role="user", content="x")]), echo=True
            ),
            "unsupported_parameter",
            "echo",
        ),
        (pb.GenerateRequest.FromString(b"\xf8\x07\x01"), "unknown_parameter", "GenerateRequest"),
        (
            pb.GenerateRequest(
                text=pb.Text(text="x"), sampling=pb.SamplingParams.FromString(b"\xf8\x07\x01")
            ),
            "unknown_parameter",
            "SamplingParams",
        ),
    ],
)
@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
async def test_bad_requests_are_typed_and_name_their_parameter(stub, rpc, request_, code, param):
    call = getattr(stub, rpc)(request_)
    status, seen, metadata = await _error(_all(call) if rpc == "GenerateStream" else call)
    assert status is GRPC_STATUS[ApiErrorCode(code)]
    assert (seen, metadata["tessera-error-param"]) == (code, param)


async def test_bytes_that_are_no_message_are_the_clients_error(connect):
    channel = await connect()
    call = channel.unary_unary(f"/{SERVICE_NAME}/Generate")(b"\xff\xff\xff")
    assert (await _error(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_overload_is_resource_exhausted_with_retry_after(stub, bench):
    bench.backend.refusal = ApiError(ApiErrorCode.OVERLOADED, "full", retry_after_s=3)
    status, _, metadata = await _error(stub.Generate(_request()))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert metadata["retry-after"] == "3"


async def test_a_failure_in_mid_stream_ends_the_stream_with_its_status(stub, bench):
    bench.backend.script = lambda r: [
        *make_outputs(r, [40, 41])[:1],
        make_failure(r, ErrorCode.ENGINE_FAILED, "gone"),
    ]
    status, code, _ = await _error(_all(stub.GenerateStream(_request())))
    assert (status, code) == (grpc.StatusCode.UNAVAILABLE, "replica_lost")


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
async def test_a_client_that_cancels_aborts_its_request(stub, bench, rpc):
    bench.backend.gate = asyncio.Semaphore(1)
    call = getattr(stub, rpc)(_request(n=2))
    while len(bench.backend.streams) < 2:
        await asyncio.sleep(0.01)
    call.cancel()
    async with asyncio.timeout(60):
        while bench.backend.num_live:
            await asyncio.sleep(0.01)
    assert any(stream.is_aborted for stream in bench.backend.streams)


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
async def test_a_client_that_cancels_before_a_replica_has_its_request_takes_it_back(
    stub, bench, rpc
):
    started, taken_back = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(request, context):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            taken_back.set()
            raise

    bench.backend.submit = wait_for_ever
    call = getattr(stub, rpc)(_request())
    async with asyncio.timeout(60):
        # A stream of a call is sent when somebody reads it, an answer when somebody waits.
        reading = asyncio.ensure_future(call.read() if rpc == "GenerateStream" else call)
        await started.wait()
        call.cancel()
        await taken_back.wait()
    await asyncio.gather(reading, return_exceptions=True)


async def test_keys_are_wanted_everywhere_but_on_health(connect):
    channel = await connect(authenticator=make_authenticator(callers_of("secret")))
    stub = pb_grpc.InferenceStub(channel)
    for call in (
        stub.Generate(_request()),
        stub.Generate(_request(), metadata=(("authorization", "Bearer wrong"),)),
        stub.Generate(_request(), metadata=(("authorization", "Bearer secret"),) * 2),
        _all(stub.GenerateStream(_request())),
        stub.ListModels(pb.ListModelsRequest()),
    ):
        assert (await _error(call))[:2] == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
    for method in ("ServerReflectionInfo", "NoSuchMethod"):
        call = channel.stream_stream(f"/grpc.reflection.v1alpha.ServerReflection/{method}")
        assert (await _error(_all(call())))[0] is grpc.StatusCode.UNAUTHENTICATED
    answer = await stub.Generate(_request(), metadata=tuple(KEY.items()))
    assert answer.choices[0].text == ANSWER
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_health_follows_readiness(connect):
    is_ready = False
    health = health_pb2_grpc.HealthStub(await connect(is_ready=lambda: is_ready))
    kinds = health_pb2.HealthCheckResponse
    for name in ("", SERVICE_NAME):
        request = health_pb2.HealthCheckRequest(service=name)
        assert (await health.Check(request)).status == kinds.NOT_SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == kinds.NOT_SERVING
    is_ready = True
    assert (await watch.read()).status == kinds.SERVING
    watch.cancel()
    status, _, _ = await _error(health.Check(health_pb2.HealthCheckRequest(service="no.such")))
    assert status is grpc.StatusCode.NOT_FOUND


async def test_a_stock_client_finds_the_service_by_reflection(connect):
    await connect()

    def list_services():
        with grpc.insecure_channel(connect.address) as blocking:
            database = ProtoReflectionDescriptorDatabase(blocking)
            names = database.get_services()
            return names, database.FindFileContainingSymbol(SERVICE_NAME).package

    names, package = await asyncio.to_thread(list_services)
    assert SERVICE_NAME in names
    assert package == "tessera.v1"


async def test_a_message_over_the_ceiling_is_refused(connect):
    stub = pb_grpc.InferenceStub(await connect(GrpcOptions()))
    huge = _request("x" * (9 << 20))
    assert (await _error(stub.Generate(huge)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
