"""Drafts that a rank's device makes: texts stay, and drafts are those that the host would make."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.rank_drafts import EagerRank, ReplayingRank
from tests.fakes.tiny_models import LATENT, MIXTURES, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_draft_model import check_always_right
from tests.unit.workers.engine.test_drafts_under_grammars import (
    CountedDrafts,
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS, Asked, run_twice
from tests.unit.workers.engine.test_grammars import PERSON, request_of, run_together
from tests.unit.workers.engine.test_mtp import Oracle, save_target
from tests.unit.workers.engine.test_speculation import assert_same, few_requests
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats
from workers.engine.results import GenerateResult
from workers.errors import EngineFailedError
from workers.graphs.capture_attempts import CaptureAttempts
from workers.graphs.graph_set import build_draft_graphs
from workers.runner.rank_drafts_runner import RankDraftsRunner
from workers.sampling.params import SamplingParams
from workers.speculation.device_step import DrafterStep

Rank = EagerRank | ReplayingRank
DRAFT: dict[str, Any] = {"speculative": "draft:builtin-draft", "draft_policy": "fixed"}


def config_of(**settings: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **{"draft_policy": "fixed", "max_draft_tokens": 3, **settings},
    )


def check_replays(rank: Rank) -> None:
    if isinstance(rank, ReplayingRank):
        capturers = rank.verifies, rank.decodes, rank.drafts
        assert min(one.num_replays for one in capturers) > 3


@pytest.mark.parametrize(
    ("rank_class", "settings"),
    [
        (EagerRank, {"page_size": 4, "max_step_tokens": 24}),
        (ReplayingRank, {"page_size": 1, "num_pages": 110, "max_running_requests": 6}),
    ],
    ids=["chunked", "replayed_and_retracted"],
)
def test_texts_are_the_same(
    plain: list[GenerateResult], rank_class: type[Rank], settings: dict[str, Any]
) -> None:
    """Drawn ones, penalties and log probabilities among them."""
    rank = rank_class(config_of(**DRAFT, **settings))
    engine = rank.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    check_replays(rank)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_pages" not in settings


@pytest.mark.parametrize(
    "rank_class", [pytest.param(EagerRank, marks=pytest.mark.nightly), ReplayingRank]
)
def test_a_draft_that_is_the_target_is_always_right(rank_class: type[Rank]) -> None:
    """Over cached prefixes, whose keys the draft has, too, and over retraction."""
    settings = {"page_size": 4, "num_pages": 34, "max_step_tokens": 40, "max_running_requests": 6}
    check_always_right(rank_class(config_of(speculative="draft:builtin", **settings)).engine())


def test_masks_are_made_behind_drafts_that_the_rank_made() -> None:
    """The host learns of them while the step runs."""
    plain = Engine.from_config(EngineConfig(device="cpu", num_cpu_threads=1))
    drafted = ReplayingRank(config_of(**DRAFT, max_running_requests=7)).engine()
    counted = CountedDrafts(drafted)
    try:
        results = results_under_grammars(drafted)
        assert_same(results, results_under_grammars(plain))
    finally:
        drafted.close()
        plain.close()
    check_grammars(results)
    assert counted.num_allowed > 5


class BrokenError(Exception):
    """What nobody foresees."""


def test_a_step_that_fails_before_its_drafts_are_made_ends_who_waits_for_them() -> None:
    """Masks wait for drafts, which the thread of steps makes."""
    rank = EagerRank(config_of(**DRAFT))

    def broken(step: DrafterStep) -> torch.Tensor:
        raise BrokenError

    rank._device_drafter.propose = broken
    engine = rank.engine()
    pool = ThreadPoolExecutor(1)
    try:
        running = pool.submit(run_together, engine, request_of(0, PERSON))
        failure = running.exception(timeout=60)
    finally:
        pool.shutdown(wait=False)
    engine.close()
    assert isinstance(failure, EngineFailedError)
    assert isinstance(failure.__cause__, BrokenError)


def test_who_waits_for_samples_is_told_what_the_step_raised() -> None:
    """Though drafts are waited for first."""
    rank = EagerRank(config_of(**DRAFT))

    def broken(step: DrafterStep) -> torch.Tensor:
        raise BrokenError

    rank._device_drafter.propose = broken
    engine = rank.engine()
    try:
        with pytest.raises(BrokenError):
            engine.generate([[*range(20, 40)]], SamplingParams(max_tokens=8, ignore_eos=True))
    finally:
        engine.close()


class Recorded:
    """A rank's drafts, beside the texts that they go on from, which the host knows by then."""

    def __init__(self, rank: RankDraftsRunner, engine: Engine) -> None:
        self.asked: list[Asked] = []
        own, history = rank._make_drafts, engine._executor._runs._history

        def make_drafts(step: DrafterStep) -> None:
            own(step)
            runs = step.runs
            rows = zip(runs.slots, runs.prefix_lens, runs.num_drafts, runs.firsts, strict=True)
            for slot, prefix_len, num_drafts, first in rows:
                text = history.token_ids[slot, : prefix_len + 1].tolist()
                drafts = step.ids[first + 1 : first + 1 + num_drafts].tolist()
                self.asked.append(Asked(text, drafts))

        rank._make_drafts = make_drafts


def recorded_run(rank: RankDraftsRunner, engine: Engine) -> tuple[list[Asked], EngineStats]:
    recorded = Recorded(rank, engine)
    stats = run_twice(engine, [[*range(20, 50), 60 + index] for index in range(4)])
    return recorded.asked, stats


FEW_PAGES = {"page_size": 4, "num_pages": 26, "max_step_tokens": 24, "max_running_requests": 4}


def check_drafts(oracle: HeadOracle | Oracle, rank: Rank) -> None:
    asked, stats = recorded_run(rank, rank.engine())
    check_replays(rank)
    assert [one.drafts for one in asked[::3]] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked[::3]
    ]
    assert len(asked) > 20
    assert stats.num_accepted_draft_tokens > 10
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("rank_class", [EagerRank, ReplayingRank])
def test_drafts_are_the_published_heads(rank_class: type[Rank], tmp_path: Path) -> None:
    """Over chunks, cached prefixes, retraction, drafts that were right before, and none at all."""
    target = save_tiny_model(DEEP, tmp_path / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(tmp_path / "head", own, DRAFT_IDS)
    config = config_of(model=str(target), speculative=f"eagle3:{head}", **FEW_PAGES)
    check_drafts(HeadOracle(head, eager_reference(target)), rank_class(config))


@pytest.mark.parametrize(
    ("tiny", "rank_class"),
    [(LATENT["deepseek_v3"], EagerRank), (MIXTURES["glm4_moe"], ReplayingRank)],
    ids=["latents", "replayed"],
)
def test_drafts_are_those_of_the_layer_behind_the_last(
    tiny: TinyModel, rank_class: type[Rank], tmp_path: Path
) -> None:
    whole = save_target(tiny, tmp_path)
    config = config_of(model=str(tmp_path), speculative="mtp", **FEW_PAGES)
    check_drafts(Oracle(tmp_path, whole), rank_class(config))


def test_a_capture_that_fails_is_told_of_drafts_and_they_go_on(
    plain: list[GenerateResult], caplog: pytest.LogCaptureFixture
) -> None:
    """The second graph of drafts fails: no other is tried, of any kind."""
    rank = ReplayingRank(config_of(**DRAFT, max_running_requests=6))
    capture, tried = rank.drafts.capture, list[str]()

    def fails_later(run: Any) -> Any:
        tried.append("draft")
        if len(tried) > 1:
            raise torch.OutOfMemoryError("injected")
        return capture(run)

    rank.drafts.capture = fails_later
    rank._captures, own = CaptureAttempts(True, lambda: None), rank._capture_missing
    rank._capture_missing = lambda plan: rank._captures.attempt(lambda: own(plan))
    engine = rank.engine()
    try:
        for _ in range(2):
            assert_same(engine.generate(*few_requests()), plain)
    finally:
        engine.close()
    assert len(tried) == 2
    assert rank._draft_graphs.num_captured == 1
    num_shapes = rank._draft_graphs.num_shapes
    told = f"1 of {num_shapes} graphs of drafts are captured, other drafts are made pass by pass: "
    assert caplog.text.count(f"{told}injected") == 1


def test_it_is_told_that_all_graphs_of_drafts_are_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = ReplayingRank(config_of(**DRAFT, max_running_requests=4))
    caplog.set_level(logging.INFO)
    num_shapes = rank._draft_graphs.num_shapes
    with torch.inference_mode():
        assert [rank._capture_next() for _ in range(num_shapes + 30)][-1] is False
    assert caplog.text.count(f"all {num_shapes} graphs of drafts are captured") == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, "torch_native cannot be captured"), ({"enable_cuda_graphs": False}, "is off")],
    ids=["backend", "flag"],
)
def test_drafts_without_graphs_say_why(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(**DRAFT, **settings)
    caplog.set_level(logging.INFO)
    drafter = EagerRank(config)._device_drafter
    assert build_draft_graphs(config, drafter, 1, None) is None  # type: ignore[arg-type]
    assert caplog.text.count("drafts are made without CUDA graphs: ") == 1
    assert reason in caplog.text


def test_a_backend_that_plans_on_the_host_drafts_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(**DRAFT)
    drafter = ReplayingRank(config)._device_drafter
    monkeypatch.setattr(type(drafter.backend), "plans_on_host", True)
    assert build_draft_graphs(config, drafter, 1, None) is None  # type: ignore[arg-type]
    assert "plans every pass on the host" in caplog.text
