"""The in-process engine against transformers, and its promises about aborts and memory."""

import dataclasses
import random

import pytest
import torch

from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, eager_reference, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.engine.observer import StepRecord
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ConfigError, RequestRejectedError
from workers.sampling.params import SamplingParams

NUM_PROMPTS = 10
NUM_OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, prompts, what transformers continues them with greedily)."""
    folder = save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("llama3"))
    reference = eager_reference(folder).eval()
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3, 90))]
        for _ in range(NUM_PROMPTS)
    ]
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return str(folder), prompts, expected


def run(config, prompts, sampling=GREEDY):
    engine = Engine.from_config(config)
    try:
        results = engine.generate(prompts, sampling)
        engine.check_integrity()
        assert engine.stats().num_used_pages == 0
        return results, engine.stats()
    finally:
        engine.close()


VARIATIONS = {
    "page_1": {"page_size": 1},
    "page_16": {"page_size": 16},
    "page_64": {"page_size": 64},
    "page_256": {"page_size": 256},
    "chunked_at_64": {"max_step_tokens": 64},
    "chunked_at_16": {"max_step_tokens": 16, "page_size": 4},
    "no_overlap": {"enable_overlap": False},
    "no_mixed": {"enable_mixed_batches": False, "max_step_tokens": 64},
    "no_prefix_cache": {"enable_prefix_cache": False},
    "one_at_a_time": {"max_running_requests": 1},
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS)
def test_greedy_tokens_equal_transformers_whatever_the_memory_layout(model, change) -> None:
    folder, prompts, expected = model
    results, _ = run(EngineConfig(model=folder, **change), prompts)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("enable_overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_retraction_changes_no_token(model, page_size, enable_overlap) -> None:
    folder, prompts, expected = model
    longest = max(len(prompt) for prompt in prompts) + NUM_OUTPUT_TOKENS
    config = EngineConfig(
        model=folder,
        page_size=page_size,
        num_pages=2 * (longest // page_size + 1),
        enable_overlap=enable_overlap,
    )
    results, stats = run(config, prompts)
    assert [result.token_ids for result in results] == expected
    assert stats.num_preemptions > 0


def test_a_prefix_hit_changes_no_token_and_is_counted(model) -> None:
    folder, prompts, expected = model
    engine = Engine.from_config(EngineConfig(model=folder, page_size=4))
    cold = engine.generate(prompts, GREEDY)
    warm = engine.generate(prompts, GREEDY)
    engine.check_integrity()
    engine.close()
    assert [result.token_ids for result in warm] == expected
    assert all(result.num_cached_tokens == 0 for result in cold)
    for prompt, result in zip(prompts, warm, strict=True):
        assert result.num_cached_tokens == (len(prompt) - 1) // 4 * 4


def test_tenants_do_not_share_prefixes(model) -> None:
    folder, prompts, _ = model
    engine = Engine.from_config(EngineConfig(model=folder, page_size=1))
    cached = []
    for salt in ("a", "b", "a"):
        engine.submit(GenerateRequest(f"{salt}{len(cached)}", prompts[0], GREEDY, cache_salt=salt))
        outputs = [output for output in drain(engine) if output.num_cached_tokens]
        cached.append(sum(output.num_cached_tokens for output in outputs))
    engine.close()
    assert cached == [0, 0, len(prompts[0]) - 1]


def test_a_seed_gives_the_same_tokens_alone_and_among_others(model) -> None:
    folder, prompts, _ = model
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    alone, _ = run(EngineConfig(model=folder), prompts[:1], seeded)
    mixed = [seeded, *[unseeded] * (NUM_PROMPTS - 1)]
    among, _ = run(EngineConfig(model=folder, seed=3), prompts, mixed)
    assert among[0].token_ids == alone[0].token_ids
    other, _ = run(EngineConfig(model=folder), prompts[:1], unseeded)
    assert other[0].token_ids != alone[0].token_ids


@pytest.mark.parametrize(("settings", "are_equal"), [({}, False), ({"seed": 3}, True)])
def test_engines_draw_alike_only_where_the_operator_says_so(model, settings, are_equal) -> None:
    folder, prompts, _ = model
    unseeded = SamplingParams(temperature=1.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    config = EngineConfig(model=folder, **settings)
    (first, _), (second, _) = (run(config, prompts[:2], unseeded) for _ in range(2))
    assert ([r.token_ids for r in first] == [r.token_ids for r in second]) is are_equal


def test_log_probabilities_come_for_output_and_prompt(model) -> None:
    folder, prompts, expected = model
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    config = EngineConfig(model=folder, max_step_tokens=16)
    results, _ = run(config, prompts[:3], params)
    for prompt, tokens, result in zip(prompts, expected, results, strict=False):
        assert [entry.top_token_ids[0] for entry in result.logprobs] == tokens[:4]
        assert all(entry.rank == 1 and len(entry.top_logprobs) == 3 for entry in result.logprobs)
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(prompt)
        assert result.prompt_logprobs[0] is None
        assert all(len(e.top_token_ids) == 2 for e in result.prompt_logprobs[1:] if e is not None)


def test_an_abort_ends_a_request_at_any_moment_and_returns_its_pages(model) -> None:
    folder, prompts, expected = model
    for steps_before in range(6):
        engine = Engine.from_config(EngineConfig(model=folder, page_size=4, max_step_tokens=32))
        for index, prompt in enumerate(prompts[:4]):
            engine.submit(GenerateRequest(str(index), prompt, GREEDY))
        outputs = [output for _ in range(steps_before) for output in engine.step()]
        engine.abort("1")
        outputs += drain(engine)
        engine.check_integrity()
        assert engine.stats().num_used_pages == 0
        engine.close()
        ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
        assert ends["1"] is FinishReason.ABORT
        for index in (0, 2, 3):
            tokens = [t for o in outputs if o.request_id == str(index) for t in o.token_ids]
            assert tokens == expected[index]


def test_what_can_never_fit_is_refused_at_once(model) -> None:
    folder, prompts, _ = model
    engine = Engine.from_config(EngineConfig(model=folder, page_size=4, num_pages=8))
    with pytest.raises(RequestRejectedError):
        engine.submit(GenerateRequest("a", prompts[0] * 40, GREEDY))
    with pytest.raises(RequestRejectedError):
        engine.submit(GenerateRequest("b", [], GREEDY))
    with pytest.raises(RequestRejectedError):
        engine.submit(GenerateRequest("c", [VOCAB_SIZE], GREEDY))
    assert not engine.has_work
    engine.close()


def test_every_step_is_observed_with_its_attention(model) -> None:
    folder, prompts, _ = model
    records: list[StepRecord] = []

    engine = Engine.from_config(EngineConfig(model=folder), on_step=records.append)
    engine.generate(prompts, GREEDY)
    engine.close()
    assert {record.phase for record in records} == {"extend", "decode"}
    assert sum(record.num_prefill_tokens for record in records) == sum(map(len, prompts))
    for record in records:
        (attention,) = record.attention
        assert 0.0 < attention.seconds < record.step_s
        assert attention.num_bytes > 0


def test_measured_steps_teach_the_scheduler_what_steps_cost(model) -> None:
    folder, prompts, _ = model
    engine = Engine.from_config(EngineConfig(model=folder, max_step_tokens=16))
    assert engine.stats().step_prediction_error_s == 0.0
    engine.generate(prompts, GREEDY)
    assert engine.stats().step_prediction_error_s > 0.0
    engine.close()


@pytest.mark.parametrize("target_inter_token_ms", [0.001, 1000.0])
def test_a_target_for_the_time_between_tokens_changes_no_token(
    model, target_inter_token_ms
) -> None:
    folder, prompts, expected = model
    config = EngineConfig(
        model=folder, max_running_requests=3, target_inter_token_ms=target_inter_token_ms
    )
    results, _ = run(config, prompts)
    assert [result.token_ids for result in results] == expected


def test_more_than_one_rank_takes_more_processes() -> None:
    with pytest.raises(ConfigError, match="more processes"):
        Engine.from_config(dataclasses.replace(EngineConfig(), tp_size=2))


def drain(engine: Engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_a_refused_prompt_of_several_leaves_nothing_behind(model) -> None:
    folder, prompts, expected = model
    engine = Engine.from_config(EngineConfig(model=folder))
    try:
        with pytest.raises(RequestRejectedError):
            engine.generate([prompts[0], []], GREEDY)
        assert not engine.has_work
        engine.check_integrity()
        assert engine.generate(prompts[:1], GREEDY)[0].token_ids == expected[0]
    finally:
        engine.close()


def test_fewer_sampling_parameters_than_prompts_are_an_error(model) -> None:
    folder, prompts, _ = model
    engine = Engine.from_config(EngineConfig(model=folder))
    try:
        with pytest.raises(ValueError, match="zip"):
            engine.generate(prompts[:2], [GREEDY])
        assert not engine.has_work
    finally:
        engine.close()


def test_a_device_that_is_none_is_a_configuration_error(model) -> None:
    with pytest.raises(ConfigError, match="no torch device"):
        Engine.from_config(EngineConfig(model=model[0], device="warp9"))


@pytest.mark.parametrize(("num_pages", "expected"), [(8, 8 * 4 + 1), (100, 200)])
def test_the_engine_tells_the_longest_request_that_it_takes(model, num_pages, expected):
    config = EngineConfig(model=model[0], page_size=4, num_pages=num_pages, max_context_len=200)
    engine = Engine.from_config(config)
    try:
        longest = engine.info.max_request_len
        assert longest == expected
        (result,) = engine.generate([[5]], SamplingParams(max_tokens=longest - 1, ignore_eos=True))
        assert len(result.token_ids) == longest - 1
        with pytest.raises(RequestRejectedError):
            engine.generate([[5]], SamplingParams(max_tokens=longest, ignore_eos=True))
    finally:
        engine.close()
