"""How much output a request may have: by its context and by the KV memory of its engine."""

import msgspec
import pytest

from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, TokenPrompt
from service.request_context import RequestContext
from service.security.quota import FreeLease
from tests.fakes.backend import MODEL_INFO
from tests.fakes.text import make_bench
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.asyncio


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


def _request(prompt_len, max_tokens):
    prompt = TokenPrompt([5] * prompt_len)
    return GenerationRequest((prompt,), SamplingParams(max_tokens=max_tokens))


async def _collect(bench, request):
    async with await bench.handler.start(request, RequestContext(), FreeLease()) as generation:
        deltas = [delta async for delta in generation]
        return deltas, generation.usage


SMALL_POOL = msgspec.structs.replace(MODEL_INFO, max_request_len=100)


@pytest.mark.parametrize("prompt_len", [1, 98, 99])
async def test_without_max_tokens_the_answer_may_fill_what_the_kv_memory_holds(
    tmp_path, prompt_len
):
    bench = make_bench(tmp_path, info=SMALL_POOL)
    await _collect(bench, _request(prompt_len, None))
    assert bench.backend.requests[0].sampling.max_tokens == 100 - prompt_len


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "param"),
    [(100, None, "prompt"), (100, 1, "prompt"), (60, 41, "max_tokens"), (1, 511, "max_tokens")],
)
async def test_what_can_never_fit_the_kv_memory_is_refused_by_the_ingress(
    tmp_path, prompt_len, max_tokens, param
):
    bench = make_bench(tmp_path, info=SMALL_POOL)
    request = _request(prompt_len, max_tokens)
    with pytest.raises(ApiError, match="KV memory") as raised:
        await bench.handler.start(request, RequestContext(), FreeLease())
    assert raised.value.code is ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert raised.value.param == param
    assert bench.backend.requests == []


@pytest.mark.parametrize("max_tokens", [None, 1])
async def test_a_prompt_may_leave_room_for_one_token_and_not_for_none(bench, max_tokens):
    full = _request(511, max_tokens)
    _, usage = await _collect(bench, full)
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (511, 1)
    over = _request(512, max_tokens)
    with pytest.raises(ApiError, match="512") as raised:
        await bench.handler.start(over, RequestContext(), FreeLease())
    assert raised.value.code is ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
