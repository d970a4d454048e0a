"""Models that keep states, in the engine: what transformers' generate() gives, whatever happens."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.tiny_state_models import (
    MAX_CONTEXT_LEN,
    NUM_OUTPUT_TOKENS,
    STATE_MODELS,
    TinyStateModel,
    greedy,
    tiny_state_model,
)
from tests.proofs.served import serves
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.engine.results import GenerateResult
from workers.errors import ConfigError
from workers.models.features import STATEFUL, ModelFeature
from workers.runner import step_pieces
from workers.runner.model_runner import ModelRunner
from workers.sampling.state import SamplingState
from workers.scheduler.plan import StepPlan

MAX_LOGPROB_ERROR = 1e-4
# Transformers' own two ways to compute the delta rule are farther apart than that: up to 5e-3, see
# tests/nightly/test_families.py. How far depends on the processor.
MAX_DELTA_RULE_ERROR = 5e-4
# What differs between ways to run shows within these: several chunks of every model.
NUM_FIRST_TOKENS = 24
LONGEST = 41 + NUM_FIRST_TOKENS


# What the others show is shown for these every night.
SLOW = {"nemotron_h", "jamba", "falcon_h1"}


@pytest.fixture(scope="module")
def of_type(tmp_path_factory) -> Callable[[str], TinyStateModel]:
    """Each is made once."""
    return functools.cache(lambda name: tiny_state_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ())
        for name in STATE_MODELS
    ],
)
def model(request, of_type) -> TinyStateModel:
    return of_type(request.param)


@pytest.fixture(scope="module")
def delta_rule(of_type) -> TinyStateModel:
    return of_type("qwen3_next")


def engine_of(model: TinyStateModel, **changes: Any) -> Engine:
    settings = {"device": "cpu", "max_context_len": MAX_CONTEXT_LEN, "max_running_requests": 8}
    return Engine.from_config(EngineConfig(model=model.folder, **{**settings, **changes}))


def run(
    model: TinyStateModel,
    prompts: list[list[int]],
    num_tokens: int = NUM_FIRST_TOKENS,
    **changes: Any,
) -> tuple[list[GenerateResult], EngineStats]:
    engine = engine_of(model, **changes)
    try:
        results = engine.generate(prompts, greedy(num_tokens))
        engine.check_integrity()
        assert {len(one.token_ids) for one in results} == {num_tokens}
        return results, engine.stats()
    finally:
        engine.close()


def check(model: TinyStateModel, results: list[GenerateResult]) -> None:
    """Tokens equal, log probabilities of prompt and output near."""
    for prompt, tokens, result in zip(model.prompts, model.expected, results, strict=True):
        assert result.token_ids == tokens[: len(result.token_ids)]
        entries = [*(result.prompt_logprobs or ())[1:], *result.logprobs]
        got = [entry.logprob for entry in entries if entry is not None]
        want = model.logprobs(prompt + result.token_ids)
        has_delta_rule = model.reference.config.model_type == "qwen3_next"
        bound = MAX_DELTA_RULE_ERROR if has_delta_rule else MAX_LOGPROB_ERROR
        assert got == pytest.approx(want, abs=bound)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 1, "num_tokens": NUM_OUTPUT_TOKENS},
        {"page_size": 16, "max_step_tokens": 16},
        {"max_running_requests": 1},  # every request takes over the slot of the one before
    ],
    ids=["batched", "chunked", "alone_in_one_slot"],
)
@serves(STATEFUL.subject, ModelFeature.CPU)
def test_tokens_and_log_probabilities_are_those_of_transformers(model, change) -> None:
    check(model, run(model, model.prompts, **change)[0])


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 16, "max_step_tokens": 16, "enable_overlap": False},
        {"page_size": 4, "max_step_tokens": 8, "enable_mixed_batches": False},
    ],
    ids=["no_overlap", "no_mixed"],
)
def test_other_ways_to_schedule_change_nothing(delta_rule, change) -> None:
    check(delta_rule, run(delta_rule, delta_rule.prompts, **change)[0])


def test_what_was_retracted_begins_from_a_fresh_state(model) -> None:
    check_retracted(model, page_size=16)


@pytest.mark.nightly
def test_retraction_with_pages_of_one_token(delta_rule) -> None:
    check_retracted(delta_rule, page_size=1)


def check_retracted(model: TinyStateModel, page_size: int) -> None:
    num_pages = 2 * (LONGEST // page_size + 1)
    results, stats = run(model, model.prompts * 3, page_size=page_size, num_pages=num_pages)
    assert stats.num_preemptions > 0
    expected = [tokens[:NUM_FIRST_TOKENS] for tokens in model.expected]
    assert [result.token_ids for result in results] == expected * 3


def outputs_of(engine: Engine, num_steps: int = 1000) -> dict[str, list[int]]:
    """Tokens by request, of at most so many steps."""
    told: dict[str, list[int]] = {}
    while engine.has_work and num_steps:
        num_steps -= 1
        for output in engine.step():
            told.setdefault(output.request_id, []).extend(output.token_ids)
    return told


def test_the_slots_of_aborted_requests_leave_nothing_behind(delta_rule) -> None:
    """Overlapped: a step that still writes to the slot is under way when the abort comes."""
    engine = engine_of(delta_rule, max_running_requests=2, max_step_tokens=16)
    for name in ("a", "b"):
        engine.submit(GenerateRequest(name, delta_rule.prompts[2], greedy()))
    outputs_of(engine, num_steps=9)
    engine.abort("a")
    engine.abort("b")
    for index, prompt in enumerate(delta_rule.prompts):
        engine.submit(GenerateRequest(str(index), prompt, greedy()))
    told = outputs_of(engine)
    engine.check_integrity()
    engine.close()
    assert [told[str(index)] for index in range(4)] == delta_rule.expected


def test_a_request_that_another_engine_began_goes_on(delta_rule) -> None:
    prompt, expected = delta_rule.prompts[1], delta_rule.expected[1]
    engine = engine_of(delta_rule, max_step_tokens=16)
    engine.submit(GenerateRequest("r", prompt, greedy(), resumed_token_ids=expected[:20]))
    told = outputs_of(engine)
    engine.close()
    assert told["r"] == expected[20:]


def test_states_that_do_not_fit_are_an_error(delta_rule) -> None:
    with pytest.raises(ConfigError, match="for the states of 1000000 requests"):
        engine_of(delta_rule, max_running_requests=1_000_000)


@pytest.fixture
def two_rows_at_most(monkeypatch) -> list[int]:
    """Sampling more rows lacks memory, after the model has run. The numbers that were tried."""
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)
    sample, tried = SamplingState.sample, []

    def limited(self: SamplingState, logits: torch.Tensor, slots: Any, *others: Any) -> Any:
        tried.append(len(slots))
        if len(slots) > 2:
            raise torch.OutOfMemoryError("injected")
        return sample(self, logits, slots, *others)

    monkeypatch.setattr(SamplingState, "sample", limited)
    return tried


def test_a_launch_that_is_repeated_in_pieces_starts_from_the_same_states(
    delta_rule, two_rows_at_most
) -> None:
    check(delta_rule, run(delta_rule, delta_rule.prompts)[0])
    assert max(two_rows_at_most) == len(delta_rule.prompts)


def test_a_row_in_pieces_goes_on_from_the_state_of_its_first_half(delta_rule, monkeypatch) -> None:
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)
    launch, ran = ModelRunner._launch, []

    def limited(self: ModelRunner, plan: StepPlan) -> Any:
        if plan.num_tokens > 7:
            raise torch.OutOfMemoryError("injected")
        ran.append(plan.num_tokens)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    check(delta_rule, run(delta_rule, delta_rule.prompts)[0])
    assert max(ran) > 4
