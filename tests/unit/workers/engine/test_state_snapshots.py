"""Cached prefixes of models that keep states: what transformers' generate() gives, with a hit."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes.tiny_reference import greedy_tokens, random_prompt
from tests.fakes.tiny_state_models import (
    MAX_CONTEXT_LEN,
    TinyStateModel,
    greedy,
    save_state_model,
)
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.engine.results import GenerateResult
from workers.errors import ConfigError
from workers.parallel.group import SingleRank
from workers.runner import model_runner, step_pieces
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams
from workers.scheduler import prefills_under_way, snapshot_memory
from workers.scheduler.plan import StepPlan

# The longest prompt passes the border at 128 tokens with them.
NUM_OUTPUT_TOKENS = 32
SAMPLING = SamplingParams(
    temperature=0.0,
    max_tokens=NUM_OUTPUT_TOKENS,
    ignore_eos=True,
    logit_bias=greedy().logit_bias,
)
STEM = random_prompt(101)
# Two that part after 71 tokens, one that begins anew, and one too short for a snapshot.
PROMPTS = [STEM, STEM[:71] + random_prompt(29), random_prompt(90), random_prompt(9)]


# What this one shows is shown for the others every night.
DELTA_RULE = "qwen3_next"
SLOW = ("mamba2", "lfm2", "falcon_h1", "nemotron_h")


@pytest.fixture(scope="module")
def with_prompts(tmp_path_factory) -> Callable[[str], TinyStateModel]:
    """Each is made once."""

    @functools.cache
    def make(name: str) -> TinyStateModel:
        folder = tmp_path_factory.mktemp(name)
        reference = save_state_model(name, folder)
        expected = [greedy_tokens(reference, one, NUM_OUTPUT_TOKENS) for one in PROMPTS]
        return TinyStateModel(str(folder), reference, PROMPTS, expected)

    return make


@pytest.fixture(
    scope="module",
    params=[DELTA_RULE, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)],
)
def model(request, with_prompts) -> TinyStateModel:
    return with_prompts(request.param)


@pytest.fixture(scope="module")
def delta_rule(with_prompts) -> TinyStateModel:
    return with_prompts(DELTA_RULE)


@pytest.fixture(scope="module")
def one_by_one(with_prompts) -> TinyStateModel:
    return with_prompts("jamba")


def build(model: TinyStateModel, **changes: Any) -> tuple[Engine, ModelRunner]:
    settings = {
        "device": "cpu",
        "max_context_len": MAX_CONTEXT_LEN,
        "max_running_requests": 8,
        "page_size": 16,
        "check_integrity_when_idle": True,
    }
    config = EngineConfig(model=model.folder, **{**settings, **changes})
    runner = ModelRunner(config, SingleRank(), resolve_device(config), lambda done, total: None)
    return Engine.of_runner(config, runner), runner


def generate(engine: Engine, prompts: list[list[int]]) -> list[GenerateResult]:
    results = engine.generate(prompts, SAMPLING)
    engine.check_integrity()
    return results


def cached(results: list[GenerateResult]) -> list[int]:
    return [result.num_cached_tokens for result in results]


def check(model: TinyStateModel, results: list[GenerateResult]) -> None:
    assert [result.token_ids for result in results] == model.expected


@pytest.fixture
def any_page_is_a_border(monkeypatch) -> None:
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 1)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.nightly), 64])
@pytest.mark.usefixtures("any_page_is_a_border")
def test_prompts_that_come_back_go_on_from_their_last_full_page(model, page_size) -> None:
    """Cut where chunks of the model's own do not end."""
    engine, _ = build(model, page_size=page_size)
    first = generate(engine, model.prompts)
    check(model, first)
    assert cached(first) == [0] * 4
    again = generate(engine, model.prompts)
    check(model, again)
    # A prompt's last token is always computed.
    assert cached(again) == [(len(one) - 1) // page_size * page_size for one in model.prompts]
    engine.close()


def test_prompts_in_chunks_are_found_again(model) -> None:
    check_second_round(model, max_step_tokens=24)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_running_requests": 3},
        {"enable_overlap": False, "enable_mixed_batches": False, "max_step_tokens": 40},
    ],
    ids=str,
)
def test_other_ways_to_schedule_find_prompts_again(delta_rule, changes) -> None:
    check_second_round(delta_rule, **changes)


def check_second_round(model: TinyStateModel, **changes: Any) -> None:
    engine, _ = build(model, **changes)
    check(model, generate(engine, model.prompts))
    again = generate(engine, model.prompts)
    check(model, again)
    assert cached(again) == [64, 64, 64, 0]
    engine.close()


def test_a_conversation_goes_on_behind_its_last_answer(delta_rule) -> None:
    engine, _ = build(delta_rule)
    own = delta_rule.prompts[0], delta_rule.prompts[3]
    answers = engine.generate(list(own), msgspec.structs.replace(SAMPLING, max_tokens=64))
    prompts = [
        prompt + answer.token_ids + [5, 7] for prompt, answer in zip(own, answers, strict=True)
    ]
    results = generate(engine, prompts)
    # Every 64 tokens: 101 + 64 tokens pass 128, 9 + 64 pass 64.
    assert cached(results) == [128, 64]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy_tokens(delta_rule.reference, prompt, NUM_OUTPUT_TOKENS)
    engine.close()


@pytest.fixture(scope="module")
def family(delta_rule) -> TinyStateModel:
    """Prompts that part after 71 tokens, 64 of which are behind a border, and end behind 128."""
    prompts = [STEM[:71] + random_prompt(70 + i) for i in range(3)]
    expected = [greedy_tokens(delta_rule.reference, one, NUM_OUTPUT_TOKENS) for one in prompts]
    return TinyStateModel(delta_rule.folder, delta_rule.reference, prompts, expected)


def test_the_place_where_prompts_were_seen_to_part_is_kept(family) -> None:
    engine, _ = build(family)
    results = [generate(engine, [prompt])[0] for prompt in family.prompts]
    # The first did not know, the second saw it.
    assert cached(results) == [0, 0, 64]
    check(family, results)
    engine.close()


@pytest.mark.parametrize("max_step_tokens", [8192, 40])
def test_requests_that_come_together_compute_their_prefix_once(
    family, max_step_tokens, monkeypatch
) -> None:
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 64)
    engine, _ = build(family, max_step_tokens=max_step_tokens)
    results = generate(engine, family.prompts)
    check(family, results)
    assert cached(results) == [0, 64, 64]
    engine.close()


def test_what_was_retracted_goes_on_from_its_snapshot(model) -> None:
    """Twice as many as before, in memory for two and a half."""
    engine, _ = build(model, num_pages=21, enable_overlap=False)
    results = generate(engine, model.prompts * 2)
    assert engine.stats().num_preemptions > 0
    assert [result.token_ids for result in results] == model.expected * 2
    engine.close()


@pytest.mark.usefixtures("any_page_is_a_border")
def test_no_output_depends_on_a_snapshot_that_was_given_back(delta_rule, monkeypatch) -> None:
    """What is free when a step is planned is NaN when it runs."""
    engine, runner = build(delta_rule, num_state_snapshots=10, max_step_tokens=40, num_pages=40)
    scheduler, (states,) = engine._scheduler, runner._states
    free_at_step: dict[int, list[int]] = {}
    schedule, begin_step = scheduler.schedule, model_runner.begin_step
    num_poisoned = []

    def schedule_and_note() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            free_at_step[plan.step_id] = list(scheduler._cache._stock._free)
        return plan

    def poison_and_begin(own_states: Any, plan: StepPlan, device: torch.device) -> None:
        places = [states._num_slots + one for one in free_at_step.pop(plan.step_id)]
        num_poisoned.append(len(places))
        for tensor in (tensor for entry in states._tensors for tensor in entry):
            tensor[places] = torch.nan
        begin_step(own_states, plan, device)

    monkeypatch.setattr(scheduler, "schedule", schedule_and_note)
    monkeypatch.setattr(model_runner, "begin_step", poison_and_begin)
    num_cached = 0
    for _ in range(3):
        results = generate(engine, delta_rule.prompts)
        check(delta_rule, results)
        num_cached += sum(cached(results))
    engine.close()
    assert num_cached > 0
    assert sum(num_poisoned) > 100


def test_aborted_requests_give_their_snapshots_back(delta_rule) -> None:
    """Overlapped: a step that saves a state may be under way when the abort comes."""
    engine, _ = build(delta_rule, page_size=1, max_step_tokens=33)
    for num_steps in range(1, 12):
        for index, prompt in enumerate(delta_rule.prompts[:2]):
            engine.submit(GenerateRequest(f"{num_steps}-{index}", prompt, SAMPLING))
        for _ in range(num_steps):
            engine.step()
            engine.check_integrity()
        for index in range(2):
            engine.abort(f"{num_steps}-{index}")
            engine.check_integrity()
    while engine.has_work:
        engine.step()
    check(delta_rule, generate(engine, delta_rule.prompts))
    engine.close()


def test_a_row_in_pieces_leaves_the_same_snapshots(delta_rule, monkeypatch) -> None:
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)
    launch, ran = ModelRunner._launch, []

    def limited(self: ModelRunner, plan: StepPlan) -> Any:
        if plan.num_tokens > 27:
            raise torch.OutOfMemoryError("injected")
        ran.append(plan.num_tokens)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    engine, _ = build(delta_rule)
    for _ in range(2):
        results = generate(engine, delta_rule.prompts)
        check(delta_rule, results)
    assert cached(results) == [64, 64, 64, 0]
    assert max(ran) > 4
    engine.close()


@pytest.mark.nightly
def test_modules_that_take_tokens_one_by_one_get_snapshots_when_asked_for(
    one_by_one, caplog
) -> None:
    engine, _ = build(one_by_one)
    assert not engine.info.has_prefix_cache
    assert caplog.text.count("without a prefix cache") == 1
    engine.close()
    engine, _ = build(one_by_one, num_state_snapshots=4)
    assert engine.info.has_prefix_cache
    generate(engine, one_by_one.prompts[:1])
    (result,) = generate(engine, one_by_one.prompts[:1])
    assert (result.token_ids, result.num_cached_tokens) == (one_by_one.expected[0], 64)
    engine.close()


def test_without_snapshots_there_is_no_prefix_cache(delta_rule, caplog) -> None:
    engine, _ = build(delta_rule, num_state_snapshots=0)
    assert caplog.text.count("without a prefix cache") == 1
    assert not engine.info.has_prefix_cache
    for _ in range(2):
        assert cached(generate(engine, delta_rule.prompts[:1])) == [0]
    engine.close()


def test_nothing_is_told_where_no_prefix_cache_was_asked_for(delta_rule, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        engine, runner = build(delta_rule, enable_prefix_cache=False)
    assert "prefix cache" not in caplog.text
    assert runner._num_snapshots == 0
    engine.close()


def test_snapshots_that_do_not_fit_are_an_error(delta_rule) -> None:
    with pytest.raises(ConfigError, match="for the states of 8 requests and their snapshots"):
        build(delta_rule, num_state_snapshots=1_000_000)
