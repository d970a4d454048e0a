"""HTTP: requests as the API wants them, tokens counted by usage, failures by code."""

import pytest

from service.bench.http_transport import HttpTransport
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from tests.unit.service.bench import http_server
from tests.unit.service.bench.http_server import FakeOpenAi, serving

pytestmark = pytest.mark.asyncio

SETTINGS = GenerationSettings(temperature=0.5, ignore_eos=True, cache_salt="run 1")
PROMPT = [7, 8, 9, 10, 11, 12]


async def send_one(app: FakeOpenAi, max_tokens: int, **options) -> RequestTrace:
    trace = RequestTrace(due_s=0.0)
    async with serving(app) as url:
        transport = HttpTransport(url, SETTINGS, **options)
        try:
            await transport.connect()
            await transport.send(BenchRequest(0, PROMPT, max_tokens), trace)
        finally:
            await transport.aclose()
    return trace


async def test_tokens_are_counted_by_usage_and_not_by_chunks() -> None:
    trace = await send_one(FakeOpenAi(tokens_per_chunk=3), 10)
    assert list(trace.event_tokens) == [3, 3, 3, 1]
    assert trace.num_output_tokens == 10
    assert trace.num_input_tokens == len(PROMPT)
    assert trace.num_cached_tokens == len(PROMPT) // 2
    assert list(trace.event_times_s) == sorted(trace.event_times_s)


async def test_a_server_that_sends_usage_only_at_the_end_still_gives_the_total() -> None:
    app = FakeOpenAi(tokens_per_chunk=2)
    app.has_continuous_usage = False
    trace = await send_one(app, 9)
    assert list(trace.event_tokens) == [0] * 5
    assert trace.num_output_tokens == 9


async def test_a_completion_request_says_what_is_wanted() -> None:
    app = FakeOpenAi()
    await send_one(app, 2, api_key="secret")
    assert app.paths == ["/v1/completions"]
    assert app.bodies == [
        {
            "model": "fake",
            "prompt": PROMPT,
            "max_tokens": 2,
            "temperature": 0.5,
            "ignore_eos": True,
            "cache_salt": "run 1",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]
    assert all(headers[b"authorization"] == b"Bearer secret" for headers in app.headers)


async def test_chat_sends_a_message_and_counts_alike() -> None:
    app = FakeOpenAi()
    trace = await send_one(app, 4, use_chat=True)
    assert app.paths == ["/v1/chat/completions"]
    (message,) = app.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == len(PROMPT)
    assert trace.num_output_tokens == 4
    assert "prompt" not in app.bodies[0]


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (http_server.OVERLOADED, "overloaded", "try later"),
        (http_server.PLAIN_TEXT_ERROR, "http_502", "bad gateway"),
        (http_server.ERROR_IN_STREAM, "replica_lost", "lost"),
        (http_server.CUT_SHORT, "incomplete_stream", "ended"),
        (http_server.NO_USAGE, "no_usage", "usage"),
        (http_server.GARBAGE, "bad_stream", "no chunk"),
    ],
)
async def test_every_way_to_fail_has_its_code(kind: int, code: str, message: str) -> None:
    with pytest.raises(RequestFailedError) as caught:
        await send_one(FakeOpenAi(), kind)
    assert caught.value.code == code
    assert message in caught.value.message


async def test_the_target_says_what_it_is() -> None:
    async with serving(FakeOpenAi()) as url:
        for address in (url, url + "/", url + "/v1"):
            transport = HttpTransport(address, SETTINGS)
            assert await transport.connect() == TargetInfo("fake", 1000, 512)
            await transport.aclose()


async def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    async with serving(FakeOpenAi()) as url:
        transport = HttpTransport(url, SETTINGS, model="other")
        with pytest.raises(TargetError, match="'other'; it serves fake"):
            await transport.connect()
        await transport.aclose()


async def test_a_refused_connection_and_a_server_of_another_kind_are_told_apart() -> None:
    app = FakeOpenAi()
    async with serving(app) as url:
        app.models = "x"  # type: ignore[assignment]
        transport = HttpTransport(url, SETTINGS)
        with pytest.raises(TargetError, match="no OpenAI API"):
            await transport.connect()
    with pytest.raises(TargetError, match="no server answers at"):
        await transport.connect()
    trace = RequestTrace(due_s=0.0)
    with pytest.raises(RequestFailedError) as caught:
        await transport.send(BenchRequest(0, PROMPT, 1), trace)
    assert caught.value.code == "connect_failed"
    await transport.aclose()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:8000", "http://[bad", ""])
async def test_an_address_that_is_none_is_a_target_error(url: str) -> None:
    transport = HttpTransport(url, SETTINGS)
    with pytest.raises(TargetError):
        await transport.connect()
    await transport.aclose()
