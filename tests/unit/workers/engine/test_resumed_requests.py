"""A real model: what a second engine adds to the output of a first one that was lost."""

import msgspec
import pytest

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

PROMPT = [5, 17, 40, 17, 5, 60, 5, 17, 40, 21]
NUM_TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=3),
    "filtered": SamplingParams(seed=4, top_k=100, top_p=0.95, min_p=0.001),
    "candidates": SamplingParams(seed=5, top_k=8),
    "penalised": SamplingParams(
        seed=6,
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        frequency_penalty=0.8,
    ),
    "greedy penalised": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "biased": SamplingParams(seed=7, logit_bias={5: 4.0, 17: -100.0}),
    "min tokens": SamplingParams(seed=8, min_tokens=16, stop_token_ids=tuple(range(60, 125))),
    "logprobs": SamplingParams(seed=10, logprobs=3, prompt_logprobs=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("llama3")))


def outputs_of(engine: Engine, request: GenerateRequest) -> list[StepOutput]:
    engine.submit(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    return outputs


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_second_engine_adds_the_tokens_that_the_first_one_would_have(folder, name) -> None:
    sampling = msgspec.structs.replace(SAMPLINGS[name], max_tokens=NUM_TOKENS)
    first = Engine.from_config(EngineConfig(model=folder, page_size=4))
    second = Engine.from_config(EngineConfig(model=folder, page_size=1, max_step_tokens=8))
    try:
        whole = outputs_of(first, GenerateRequest("whole", PROMPT, sampling))
        expected = tokens(whole)
        assert len(expected) > 8
        for num_done in (1, 2, 7, len(expected) - 1):
            done = expected[:num_done]
            request = GenerateRequest("rest", PROMPT, sampling, resumed_token_ids=done)
            rest = outputs_of(second, request)
            assert tokens(rest) == expected[num_done:]
            assert rest[-1].finish_reason is whole[-1].finish_reason
            assert rest[0].prompt_logprobs is None
            check_logprobs(rest, whole[num_done:])
    finally:
        first.close()
        second.close()


def check_logprobs(rest: list[StepOutput], expected: list[StepOutput]) -> None:
    for output, same in zip(rest, expected, strict=True):
        assert (output.logprobs is None) is (same.logprobs is None)
        for entry, other in zip(output.logprobs or (), same.logprobs or (), strict=True):
            assert entry.top_token_ids == other.top_token_ids
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_what_was_streamed_is_found_in_the_cache_when_it_goes_on_where_it_was(folder) -> None:
    engine = Engine.from_config(EngineConfig(model=folder, page_size=1))
    try:
        sampling = SamplingParams(seed=3, max_tokens=NUM_TOKENS)
        expected = tokens(outputs_of(engine, GenerateRequest("whole", PROMPT, sampling)))
        before = engine.stats()
        request = GenerateRequest("rest", PROMPT, sampling, resumed_token_ids=expected[:20])
        assert tokens(outputs_of(engine, request)) == expected[20:]
        after = engine.stats()
        found = after.num_cached_prompt_tokens - before.num_cached_prompt_tokens
        assert found == len(PROMPT) + 20 - 1
        assert after.num_prompt_tokens - before.num_prompt_tokens == len(PROMPT) + 20
    finally:
        engine.close()
