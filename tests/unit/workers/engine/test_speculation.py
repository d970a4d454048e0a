"""Speculation changes no text: the same tokens, log probabilities and ends with and without."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.tiny_reference import build_reference, config_of
from workers import Engine
from workers.config import EngineConfig
from workers.engine.observer import StepRecord
from workers.engine.protocol import EngineStats
from workers.engine.results import GenerateResult
from workers.errors import ConfigError
from workers.sampling.params import SamplingParams

NUM_REQUESTS = 16


def prompts_of(rng: random.Random, num_requests: int) -> list[list[int]]:
    """Half of them say a thing twice, and share how they begin."""
    phrase = [rng.randrange(5, 200) for _ in range(12)]
    prompts = []
    for index in range(num_requests):
        own = [rng.randrange(5, 200) for _ in range(rng.randrange(1, 20))]
        prompts.append(phrase + own + phrase[: rng.randrange(12)] if index % 2 else own)
    return prompts


def sampling_of(rng: random.Random, index: int, most_tokens: int) -> SamplingParams:
    max_tokens = rng.randrange(1, most_tokens)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        seed=index,
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, rng.choice([0, 0, 6])),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {7: 3.0}]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (11, 12)]),
    )


Requests = tuple[list[list[int]], list[SamplingParams]]


def mixed_requests(
    num_requests: int = NUM_REQUESTS, most_tokens: int = 40, seed: int = 5
) -> Requests:
    rng = random.Random(seed)
    prompts = prompts_of(rng, num_requests)
    return prompts, [sampling_of(rng, index, most_tokens) for index in range(num_requests)]


def few_requests() -> Requests:
    """Of every kind, with half as many tokens; all of them end by their number."""
    return mixed_requests(10, 28, seed=9)


def finish(engine: Engine, requests: Requests) -> tuple[list[GenerateResult], EngineStats]:
    """What the engine answers and has counted by then; it is closed."""
    try:
        return engine.generate(*requests), engine.stats()
    finally:
        engine.close()


def engine_with(speculative: str | None, tree: tuple[int, ...], **settings: Any) -> Engine:
    """Up to five drafts a step, or a tree's."""
    return Engine.from_config(
        EngineConfig(
            speculative=speculative,
            draft_policy="fixed",
            max_draft_tokens=5,
            draft_tree=tree,
            num_cpu_threads=1,
            **settings,
        )
    )


def run(**settings: Any) -> tuple[list[GenerateResult], EngineStats]:
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **{"draft_policy": "fixed", **settings},
    )
    return finish(Engine.from_config(config), few_requests())


def assert_same(results: list[GenerateResult], plain: list[GenerateResult]) -> None:
    for expected, found in zip(plain, results, strict=True):
        assert found.token_ids == expected.token_ids
        assert (found.finish_reason, found.stop_token_id) == (
            expected.finish_reason,
            expected.stop_token_id,
        )
        told = [entry.logprob for entry in found.logprobs]
        assert told == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
        assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 16},
        {"page_size": 1, "num_pages": 120, "max_draft_tokens": 7, "speculative": "suffix"},
        {"page_size": 4, "max_step_tokens": 24, "enable_overlap": False},
        {"page_size": 16, "speculative": "suffix", "draft_policy": "adaptive"},
        {"page_size": 64, "enable_mixed_batches": False, "max_running_requests": 3},
        {"page_size": 2, "num_pages": 66, "speculative": "suffix", "draft_tree": (4, 3, 2)},
    ],
    ids=["page_16", "page_1_retracted", "page_4_chunked", "adaptive", "page_64_by_turns", "trees"],
)
def test_texts_are_the_same(plain: list[GenerateResult], settings: Mapping[str, Any]) -> None:
    results, stats = run(**{"speculative": "ngram", **settings})
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or settings.get("num_pages") is None


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    phrase = [*range(20, 60)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={7: 100.0})
    steps, records = [], list[StepRecord]()
    for speculative in (None, "ngram"):
        records.clear()
        engine = Engine.from_config(
            EngineConfig(speculative=speculative, draft_policy="fixed", num_cpu_threads=1),
            on_step=records.append,
        )
        try:
            engine.generate([phrase], sampling)
            steps.append(engine.stats().num_steps)
        finally:
            engine.close()
        drafting = [one.phase for one in records if one.draft_s > 0]
        assert drafting == [one.phase for one in records if one.phase == "verify"]
        assert all(one.draft_s < one.step_s for one in records)
    assert drafting
    assert steps[1] < steps[0] / 3


RULES = (
    SamplingParams(temperature=0.0, frequency_penalty=1.9, logit_bias={7: 40.0, 8: 30.0}),
    SamplingParams(
        seed=3, repetition_penalty=1.1, frequency_penalty=0.8, logit_bias={7: 40.0, 9: 30.0}
    ),
    SamplingParams(
        temperature=0.0,
        bad_words=((7, 7, 7), (8, 7, 7, 8)),
        frequency_penalty=0.1,
        logit_bias={7: 60.0, 8: 50.0},
    ),
    SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=(7,), logit_bias={7: 60.0}),
)
"""Texts that repeat themselves, and rules that the tokens before a draft decide about."""


def test_what_looks_at_the_tokens_before_counts_the_drafts_that_hold() -> None:
    samplings = [
        msgspec.structs.replace(own, max_tokens=48, logprobs=1, ignore_eos=True) for own in RULES
    ]
    told, num_right = [], []
    for speculative, tree in ((None, ()), ("ngram", ()), ("suffix", (2, 2, 2))):
        requests = [[*range(20, 40)]] * len(samplings), samplings
        results, stats = finish(engine_with(speculative, tree), requests)
        told.append(results)
        num_right.append(stats.num_accepted_draft_tokens)
    for results in told[1:]:
        assert_same(results, told[0])
    assert [len(set(one.token_ids[:40])) > 1 for one in told[0]] == [True] * 4
    assert min(num_right[1:]) > 60


@pytest.mark.parametrize(
    ("speculative", "tree"), [("ngram", ()), ("suffix", (2, 2, 2)), ("draft:builtin", ())]
)
def test_a_text_ends_within_drafts_that_hold(speculative: str, tree: tuple[int, ...]) -> None:
    """What was drafted behind its end, and would hold, is none of its text."""
    cycle = [53, 54, 60]
    samplings = [
        SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, stop_token_ids=stop_ids
        )
        for stop_ids in ((cycle[-1],), ())
    ]
    engine = engine_with(speculative, tree, check_integrity_when_idle=True)
    (ended, whole), stats = finish(engine, ([[*range(20, 60), *cycle * 2]] * 2, samplings))
    assert whole.token_ids == cycle * 4
    assert (ended.token_ids, len(ended.logprobs)) == (cycle, len(cycle))
    assert (ended.finish_reason, ended.stop_token_id) == ("stop", cycle[-1])
    assert stats.num_accepted_draft_tokens > 6


def test_a_recurrent_state_and_drafts_are_refused_together(tmp_path: Path) -> None:
    config = config_of("mamba2", "Mamba2ForCausalLM", {})
    build_reference(config, "Mamba2ForCausalLM", tmp_path)
    settings = {"model": str(tmp_path), "device": "cpu", "max_context_len": 64}
    with pytest.raises(ConfigError, match="cannot forget a wrong draft"):
        Engine.from_config(EngineConfig(**settings, speculative="ngram"))


@pytest.mark.parametrize("max_draft_tokens", [0, 33])
def test_as_many_drafts_are_refused_by_name(max_draft_tokens: int) -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        EngineConfig(speculative="ngram", max_draft_tokens=max_draft_tokens)
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        EngineConfig(max_draft_tokens=max_draft_tokens)
    with pytest.raises(ConfigError, match="draft_policy 'none' is not known"):
        EngineConfig(draft_policy="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lookup", "one of ngram"),
        ("", "one of ngram"),
        ("ngram:builtin", "ngram runs no model"),
        ("draft", "needs a model, draft:MODEL"),
        ("draft:", "draft needs a model"),
    ],
)
def test_a_method_that_is_none_is_refused_by_the_names_of_those_there_are(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative=text)
