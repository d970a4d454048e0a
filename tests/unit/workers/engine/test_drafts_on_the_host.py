"""Drafts that the host puts into plans, for ranks that know of none: texts are as without them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.drafted_runner import DraftedRunner, ReplayingRunner
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.workers.engine.test_speculation import assert_same, few_requests
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.engine.results import GenerateResult
from workers.runner.executor import PendingStep, StepExecutor
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import StepPlan


@pytest.mark.parametrize(
    ("runner", "settings"),
    [
        pytest.param(
            ReplayingRunner, {"page_size": 16, "max_running_requests": 6}, marks=pytest.mark.nightly
        ),
        (DraftedRunner, {"page_size": 1, "num_pages": 120, "max_draft_tokens": 7}),
        (ReplayingRunner, {"page_size": 4, "max_step_tokens": 24}),
        (ReplayingRunner, {"speculative": "suffix", "enable_overlap": False}),
    ],
    ids=["replayed", "retracted", "chunked", "suffix_without_overlap"],
)
def test_texts_are_the_same(
    plain: list[GenerateResult], runner: type[DraftedRunner], settings: Mapping[str, Any]
) -> None:
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **{"speculative": "ngram", "draft_policy": "fixed", **settings},
    )
    rank = runner(config)
    engine = rank.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or settings.get("num_pages") is None
    if isinstance(rank, ReplayingRunner):
        assert rank.capturer.num_replays > 3


class RecordingExecutor:
    """Stands where plans are sent to other ranks."""

    def __init__(self, inner: StepExecutor) -> None:
        self.plans: list[StepPlan] = []
        self._launch = inner.launch
        self.close, self.forget_masks = inner.close, inner.forget_masks

    def launch(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        return self._launch(plan)


def test_ranks_are_sent_drafts_by_name() -> None:
    config = EngineConfig(
        device="cpu", num_cpu_threads=1, speculative="ngram", draft_policy="fixed"
    )
    seen: list[RecordingExecutor] = []

    def recording(inner: StepExecutor) -> StepExecutor:
        seen.append(RecordingExecutor(inner))
        return seen[0]  # type: ignore[return-value]

    engine = Engine.of_runner(config, DraftedRunner(config), wrap_executor=recording)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine.generate([[*range(20, 40)] * 2], sampling)
    finally:
        engine.close()
    runs = [plan for plan in seen[0].plans if plan.has_runs]
    assert runs
    assert all((plan.input_ids >= 0).all() for plan in runs)


NO_NUMBER_TOKEN = 77


def test_a_request_of_no_numbers_spoils_none_whose_row_is_filled_up_beside_it(
    tmp_path: Path,
) -> None:
    """In a graph for four drafts, tokens that fill its row up would write NaN where those of a row
    with two drafts have theirs."""
    config = EngineConfig(
        model=str(save_tiny_model(NATIVE["llama2_mha"], tmp_path)),
        device="cpu",
        num_cpu_threads=1,
        max_context_len=128,
        max_running_requests=3,
        speculative="ngram",
        draft_policy="fixed",
    )
    rank = ReplayingRunner(config)
    rank._model.get_parameter("model.embed_tokens.weight").data[NO_NUMBER_TOKEN] = torch.nan
    while rank.graphs.capture_next():
        pass
    engine = rank.engine()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={7: 100.0}
    )
    last: dict[str, StepOutput] = {}

    def submit(request_id: str, prompt: list[int], max_draft_tokens: int) -> None:
        engine.submit(
            GenerateRequest(request_id, prompt, sampling, max_draft_tokens=max_draft_tokens)
        )

    try:
        submit("two", [*range(20, 40)], 2)
        submit("four", [*range(20, 40)], 4)
        for num_steps in range(100):
            if num_steps == 6:
                submit("none", [*range(20, 40), NO_NUMBER_TOKEN], 1)
            last.update((one.request_id, one) for one in engine.step())
    finally:
        engine.close()
    assert rank.capturer.num_replays > 3
    assert {request_id: one.finish_reason for request_id, one in last.items()} == {
        "two": FinishReason.LENGTH,
        "four": FinishReason.LENGTH,
        "none": FinishReason.ERROR,
    }
