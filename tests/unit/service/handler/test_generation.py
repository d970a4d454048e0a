"""The handler from request to deltas: text, stops, choices, usage, endings, metrics."""

import asyncio
import itertools

import pytest

from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, TextOptions, TokenPrompt
from service.limits import Limits
from service.request_context import RequestContext
from service.security.callers import Caller
from service.security.quota import FreeLease, UnlimitedQuota
from service.tokenizer.jobs import EncodeChat, EncodeText
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.text import ANSWER, make_bench
from workers.engine.protocol import FinishReason, StepOutput
from workers.errors import ErrorCode
from workers.sampling.params import MAX_SEED, SamplingParams

pytestmark = pytest.mark.asyncio


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


def _request(prompt="hello", **fields):
    fields.setdefault("sampling", SamplingParams(max_tokens=fields.pop("max_tokens", 100)))
    prompts = prompt if isinstance(prompt, tuple) else (EncodeText(prompt),)
    return GenerationRequest(prompts=prompts, **fields)


async def _collect(bench, request):
    async with await bench.handler.start(request, RequestContext(), FreeLease()) as generation:
        deltas = [delta async for delta in generation]
    return deltas, generation.usage


def _texts(deltas, num_choices=1):
    return [
        "".join(delta.text for delta in deltas if delta.index == index)
        for index in range(num_choices)
    ]


async def test_text_and_usage_of_a_plain_request(bench):
    deltas, usage = await _collect(bench, _request("hello world"))
    assert _texts(deltas) == [ANSWER]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert usage.num_prompt_tokens == len(bench.tokenizer.ids("hello world"))
    assert usage.num_output_tokens == len(bench.tokenizer.ids(ANSWER)) + 1
    assert not bench.backend.streams[0].is_aborted


async def test_reaching_max_tokens_is_finish_reason_length(bench):
    deltas, usage = await _collect(bench, _request(max_tokens=3))
    assert deltas[-1].finish_reason == "length"
    assert usage.num_output_tokens == 3


async def test_a_stop_string_ends_the_choice_and_aborts_the_engine_request(bench):
    request = _request(text=TextOptions(stop=("naïve", "never")))
    deltas, usage = await _collect(bench, request)
    assert _texts(deltas) == ["hello world, "]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "naïve")
    assert bench.backend.streams[0].is_aborted
    shown = bench.tokenizer.ids("hello world, naïve")
    assert abs(usage.num_output_tokens - len(shown)) <= 1


async def test_the_stop_string_is_included_when_asked_for(bench):
    text = TextOptions(stop=("world",), include_stop=True)
    deltas, _ = await _collect(bench, _request(text=text))
    assert _texts(deltas) == ["hello world"]


async def test_stop_strings_do_not_count_before_min_tokens(bench):
    sampling = SamplingParams(max_tokens=100, min_tokens=2)
    deltas, _ = await _collect(bench, _request(sampling=sampling, text=TextOptions(stop=("o",))))
    assert _texts(deltas) == [ANSWER]
    deltas, _ = await _collect(bench, _request(sampling=sampling, text=TextOptions(stop=("é",))))
    assert _texts(deltas) == [ANSWER.partition("é")[0]]


async def test_a_requested_stop_token_is_named_and_hidden(tmp_path):
    bench = make_bench(tmp_path)
    stop_id = bench.tokenizer.ids("!")[0]
    bench.backend.script = lambda request: make_outputs(
        request, [*bench.tokenizer.ids("hi"), stop_id]
    )
    sampling = SamplingParams(max_tokens=50, stop_token_ids=(stop_id,))
    deltas, usage = await _collect(bench, _request(sampling=sampling))
    assert _texts(deltas) == ["hi"]
    assert deltas[-1].stop_reason == stop_id
    shown, _ = await _collect(
        bench, _request(sampling=sampling, text=TextOptions(include_stop=True))
    )
    assert _texts(shown) == ["hi!"]
    assert usage.num_output_tokens == len(bench.tokenizer.ids("hi")) + 1


async def test_text_held_back_for_a_stop_string_is_shown_at_the_end(bench):
    deltas, _ = await _collect(bench, _request(text=TextOptions(stop=("café\nX",))))
    assert _texts(deltas) == [ANSWER]


async def test_choices_of_all_prompts_are_numbered_seeded_and_merged(bench):
    prompts = (EncodeText("hello"), TokenPrompt([5, 6, 7]))
    sampling = SamplingParams(max_tokens=100, seed=41)
    deltas, usage = await _collect(bench, _request(prompts, n=3, sampling=sampling))
    assert _texts(deltas, 6) == [ANSWER] * 6
    assert [request.sampling.seed for request in bench.backend.requests] == [41, 42, 43] * 2
    assert len({request.request_id for request in bench.backend.requests}) == 6
    assert usage.num_prompt_tokens == len(bench.tokenizer.ids("hello")) + 3


async def test_seeds_wrap_around_instead_of_overflowing(bench):
    await _collect(bench, _request(n=2, sampling=SamplingParams(max_tokens=2, seed=MAX_SEED)))
    assert [r.sampling.seed for r in bench.backend.requests] == [MAX_SEED, 0]


async def test_cached_tokens_are_those_of_each_prompts_first_choice(tmp_path):
    bench = make_bench(
        tmp_path, lambda request: make_outputs(request, [40, 2], num_cached_tokens=3)
    )
    _, usage = await _collect(bench, _request(n=2))
    assert usage.num_cached_tokens == 3


async def test_a_failing_choice_ends_the_others_with_its_typed_error(tmp_path):
    def script(request):
        if request.request_id.endswith("-1"):
            return [make_failure(request, ErrorCode.ENGINE_FAILED, "gone")]
        return make_outputs(request, [40] * 50)

    bench = make_bench(tmp_path, script)
    with pytest.raises(ApiError) as raised:
        await _collect(bench, _request(n=3))
    assert raised.value.code is ApiErrorCode.REPLICA_LOST
    assert bench.backend.num_live == 0
    reasons = sorted(reason for reason, _ in bench.metrics.named("finished"))
    assert reasons == ["abort", "abort", "replica_lost"]


async def test_a_stream_that_breaks_off_is_a_typed_error(tmp_path):
    bench = make_bench(tmp_path, lambda request: make_outputs(request, [40, 41])[:1])
    with pytest.raises(ApiError) as raised:
        await _collect(bench, _request())
    assert raised.value.code is ApiErrorCode.REPLICA_LOST


async def test_an_abort_that_nobody_here_asked_for_is_a_typed_error(tmp_path):
    bench = make_bench(
        tmp_path, lambda request: make_outputs(request, [40, 41], finish=FinishReason.ABORT)
    )
    with pytest.raises(ApiError) as raised:
        await _collect(bench, _request())
    assert raised.value.code is ApiErrorCode.REPLICA_LOST


@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_that_is_cancelled_aborts_every_choice(bench, n):
    bench.backend.gate = asyncio.Semaphore(2)
    reader = asyncio.create_task(_collect(bench, _request(n=n)))
    while not bench.backend.gate.locked():
        await asyncio.sleep(0.001)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert len(bench.backend.streams) == n
    assert all(stream.is_aborted for stream in bench.backend.streams)
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["abort"] * n


async def test_a_refused_submit_leaves_no_choice_running(bench):
    calls = []
    submit = bench.backend.submit

    async def refuse_the_third(request, context):
        calls.append(request)
        if len(calls) == 3:
            raise ApiError(ApiErrorCode.OVERLOADED, "full")
        return await submit(request, context)

    bench.backend.submit = refuse_the_third
    with pytest.raises(ApiError, match="full"):
        await bench.handler.start(_request(n=4), RequestContext(), FreeLease())
    assert bench.backend.num_live == 0
    assert bench.metrics.calls == []


async def test_what_is_not_admitted_is_not_tokenised(bench, monkeypatch):
    async def never(job, flow):
        raise AssertionError("tokenised")

    monkeypatch.setattr(bench.tokenizer, "encode_text", never)
    bench.backend.is_full = True
    with pytest.raises(ApiError, match="full"):
        await bench.handler.start(_request(), RequestContext(), FreeLease())
    assert bench.metrics.calls == []


@pytest.mark.parametrize("prompt", [EncodeText("hello"), EncodeChat([{"role": "user"}])])
async def test_the_tokenizer_is_told_what_fits_unless_the_prompt_is_cut(bench, monkeypatch, prompt):
    jobs = []

    async def encode(job, flow):
        jobs.append((job.max_tokens, flow))
        return [1]

    monkeypatch.setattr(bench.tokenizer, "encode_text", encode)
    monkeypatch.setattr(bench.tokenizer, "encode_chat", encode)
    context = RequestContext(Caller("anne", UnlimitedQuota()))
    for fields in ({}, {"truncate_prompt_tokens": 5}):
        generation = await bench.handler.start(_request((prompt,), **fields), context, FreeLease())
        await generation.aclose()
    await bench.handler.tokenise(prompt, context)
    room = bench.handler.model_info.max_context_len - 1
    assert [max_tokens for max_tokens, _ in jobs] == [room, None, None]
    assert {flow.caller for _, flow in jobs} == {"anne"}


async def test_echo_puts_the_prompt_and_its_log_probabilities_first(bench):
    sampling = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
    request = _request("naïve 🙂", sampling=sampling, text=TextOptions(echo=True))
    deltas, usage = await _collect(bench, request)
    text = _texts(deltas)[0]
    assert text.startswith("naïve 🙂")
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    assert len(entries) == usage.num_prompt_tokens + usage.num_output_tokens
    assert entries[0].logprob is None
    assert b"".join(entry.token for entry in entries).decode() == text
    boundary = entries[usage.num_prompt_tokens]
    assert boundary.text_offset == len("naïve 🙂")


async def test_scoring_only_generates_nothing(bench):
    sampling = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)
    text = TextOptions(echo=True)
    request = _request("hello", sampling=sampling, text=text, is_scoring_only=True)
    deltas, usage = await _collect(bench, request)
    assert _texts(deltas) == ["hello"]
    assert deltas[-1].finish_reason == "length"
    assert usage.num_output_tokens == 0


async def test_truncation_keeps_the_end_of_the_prompt(bench):
    await _collect(bench, _request((TokenPrompt([5, 6, 7, 8]),), truncate_prompt_tokens=2))
    assert bench.backend.requests[0].prompt_token_ids == [7, 8]


async def test_without_max_tokens_the_context_or_the_default_is_the_limit(bench):
    await _collect(bench, _request((TokenPrompt([5] * 12),), sampling=SamplingParams()))
    await _collect(
        bench,
        _request((TokenPrompt([5] * 510),), sampling=SamplingParams(), default_max_tokens=16),
    )
    assert [r.sampling.max_tokens for r in bench.backend.requests] == [500, 2]


async def test_metrics_of_a_request_that_finishes(bench):
    deltas, usage = await _collect(bench, _request())
    assert bench.metrics.named("accepted") == [(usage.num_prompt_tokens, 1)]
    assert len(bench.metrics.named("first_token")) == 1
    assert len(bench.metrics.named("tokens")) == usage.num_output_tokens - 1
    ((reason, numbers),) = bench.metrics.named("finished")
    assert reason == "stop"
    assert numbers["num_output_tokens"] == usage.num_output_tokens
    assert deltas


CHAT = EncodeChat([{"role": "user", "content": "x" * 100}])
SMALL = Limits(
    max_n=2,
    max_prompts=2,
    max_prompt_bytes=64,
    max_prompt_tokens=40,
    max_messages=1,
    max_logprobs=2,
    max_stop_strings=1,
    max_stop_string_bytes=4,
    max_stop_token_ids=1,
    max_logit_bias_entries=1,
    max_request_cost_tokens=300,
    max_logprob_entries=100,
    max_cache_salt_bytes=4,
    max_request_id_bytes=4,
    max_session_id_bytes=4,
)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 0}, "limit_exceeded", "n"),
        ({"n": 3}, "limit_exceeded", "n"),
        ({"prompt": (EncodeText("a"),) * 3}, "limit_exceeded", "prompt"),
        ({"prompt": ()}, "limit_exceeded", "prompt"),
        ({"prompt": "é" * 33}, "limit_exceeded", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": (TokenPrompt([]),)}, "invalid_request", "prompt"),
        ({"prompt": (TokenPrompt([420]),)}, "invalid_request", "prompt"),
        ({"prompt": (TokenPrompt([-1]),)}, "invalid_request", "prompt"),
        ({"prompt": (TokenPrompt([5] * 41),)}, "limit_exceeded", "prompt"),
        ({"prompt": (CHAT,)}, "limit_exceeded", "messages"),
        ({"prompt": (EncodeChat([]),)}, "limit_exceeded", "messages"),
        ({"prompt": (EncodeChat(CHAT.messages * 2),)}, "limit_exceeded", "messages"),
        ({"text": TextOptions(stop=("a", "b"))}, "limit_exceeded", "stop"),
        ({"text": TextOptions(stop=("ééé",))}, "limit_exceeded", "stop"),
        ({"text": TextOptions(stop=("",))}, "invalid_request", "stop"),
        ({"sampling": SamplingParams(temperature=3.0)}, "invalid_request", "temperature"),
        ({"sampling": SamplingParams(logprobs=3)}, "limit_exceeded", "logprobs"),
        ({"sampling": SamplingParams(prompt_logprobs=3)}, "limit_exceeded", "prompt_logprobs"),
        ({"sampling": SamplingParams(stop_token_ids=(1, 2))}, "limit_exceeded", "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={1: 1, 2: 1})}, "limit_exceeded", "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={9999: 1})}, "invalid_request", "logit_bias"),
        ({"max_tokens": 301}, "limit_exceeded", "max_tokens"),
        ({"max_tokens": 150, "n": 2}, "limit_exceeded", "max_tokens"),
        (
            {"sampling": SamplingParams(logprobs=2, max_tokens=40)},
            "limit_exceeded",
            "logprobs",
        ),
        ({"cache_salt": "12345"}, "limit_exceeded", "cache_salt"),
        ({"request_id": "12345"}, "limit_exceeded", "request_id"),
        ({"session_id": "12345"}, "limit_exceeded", "session_id"),
        ({"priority": 1}, "limit_exceeded", "priority"),
        ({"truncate_prompt_tokens": 0}, "invalid_request", "truncate_prompt_tokens"),
    ],
)
async def test_every_ceiling_is_a_typed_error_naming_its_parameter(tmp_path, fields, code, param):
    bench = make_bench(tmp_path, limits=SMALL)
    fields = {"max_tokens": 5, **fields} if "sampling" not in fields else fields
    with pytest.raises(ApiError) as raised:
        await bench.handler.start(_request(**fields), RequestContext(), FreeLease())
    assert (raised.value.code.value, raised.value.param) == (code, param)
    assert bench.backend.requests == []
    assert bench.metrics.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": (TokenPrompt([5] * 512),), "max_tokens": 1}, "prompt"),
        ({"prompt": (TokenPrompt([5] * 500),), "max_tokens": 13}, "max_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_is_refused(bench, fields, param):
    with pytest.raises(ApiError) as raised:
        await bench.handler.start(_request(**fields), RequestContext(), FreeLease())
    assert raised.value.code is ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert raised.value.param == param


async def test_tokens_that_came_together_share_the_time_since_the_last_one(bench):
    together = [StepOutput("r", [7]), StepOutput("r", [8, 9, 10, 11]), StepOutput("r", [2])]
    together[-1].finish_reason = FinishReason.STOP
    bench.backend.script = lambda request: together
    bench.handler._clock = itertools.count(step=0.8).__next__  # each look is 0.8 s after the last
    await _collect(bench, _request())
    assert bench.metrics.named("tokens") == [(4, pytest.approx(0.2)), (1, pytest.approx(0.8))]
