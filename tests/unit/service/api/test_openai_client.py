"""The official client gets what it expects, streamed and not."""

import openai
import pytest

from service.errors import ApiError, ApiErrorCode
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.text import ANSWER
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_chat(openai_client):
    answer = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_streamed_equals_chat(openai_client):
    stream = await openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == ANSWER
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_of_several_prompts(openai_client, bench):
    answer = await openai_client.completions.create(
        model="tiny", prompt=["hello", "world"], max_tokens=50, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {ANSWER}
    prompts = [request.prompt_token_ids for request in bench.backend.requests]
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_completion_of_token_ids(openai_client, bench, prompt):
    await openai_client.completions.create(model="tiny", prompt=prompt)
    assert bench.backend.requests[0].prompt_token_ids == [5, 6, 7]
    assert bench.backend.requests[0].sampling.max_tokens == 16


async def test_completion_streamed_with_usage_in_every_chunk(openai_client):
    stream = await openai_client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == ANSWER
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


async def test_chat_log_probabilities(openai_client):
    answer = await openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    shown = [entry for entry in content if entry.token != "<|im_end|>"]
    assert bytes(byte for entry in shown for byte in entry.bytes).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == -0.5


async def test_completion_log_probabilities_with_echo(openai_client):
    answer = await openai_client.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "hello"
    assert "".join(choice.logprobs.tokens) == "hello"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[0] == 0
    assert answer.usage.completion_tokens == 0


async def test_vllm_extensions_are_honoured(openai_client, bench):
    answer = await openai_client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=9,
        logit_bias={"7": 1.5},
        seed=3,
        stop=["zzz"],
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_tokens": 2,
            "skip_special_tokens": False,
            "prompt_logprobs": 1,
            "cache_salt": "tenant",
            "request_id": "mine",
            "return_token_ids": True,
        },
    )
    request = bench.backend.requests[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ((9,), True, 2)
    assert (sampling.seed, sampling.logit_bias, sampling.max_tokens) == (3, {7: 1.5}, 9)
    assert request.cache_salt == "tenant"
    assert answer.id == "cmpl-mine"
    choice = answer.choices[0]
    assert choice.prompt_token_ids == request.prompt_token_ids
    assert len(choice.token_ids) == answer.usage.completion_tokens
    assert choice.prompt_logprobs[0] is None
    assert len(choice.prompt_logprobs) == answer.usage.prompt_tokens


async def test_cached_tokens_are_reported(openai_client, bench):
    bench.backend.script = lambda r: make_outputs(r, [40, 2], num_cached_tokens=2)
    answer = await openai_client.completions.create(model="tiny", prompt="hello")
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_models(openai_client):
    models = await openai_client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await openai_client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await openai_client.models.retrieve("other/model")


async def test_an_overloaded_service_is_a_rate_limit_with_retry_after(openai_client, bench):
    bench.backend.refusal = ApiError(ApiErrorCode.OVERLOADED, "full", retry_after_s=1.5)
    with pytest.raises(openai.RateLimitError) as raised:
        await openai_client.completions.create(model="tiny", prompt="hello", stream=True)
    assert raised.value.response.headers["retry-after"] == "2"
    assert raised.value.code == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_gives_its_own_status_even_when_streaming(
    openai_client, bench, stream
):
    bench.backend.script = lambda r: [make_failure(r, ErrorCode.QUEUE_FULL, "queue is full")]
    with pytest.raises(openai.RateLimitError):
        await openai_client.completions.create(model="tiny", prompt="hello", stream=stream)


async def test_a_failure_in_mid_stream_is_an_error_event(openai_client, bench):
    bench.backend.script = lambda r: [
        *make_outputs(r, [40, 41, 42])[:2],
        make_failure(r, ErrorCode.ENGINE_FAILED, "the replica is gone"),
    ]
    stream = await openai_client.completions.create(model="tiny", prompt="hello", stream=True)
    assert [(await anext(stream)).choices[0].finish_reason for _ in range(2)] == [None, None]
    with pytest.raises(openai.APIError, match="the replica is gone") as raised:
        await anext(stream)
    assert raised.value.body["code"] == "replica_lost"
