"""Trees of drafts that a rank's device makes: texts stay, trees are those that the host grows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.eagle_heads import save_head
from tests.fakes.rank_drafts import (
    EagerTreeRank,
    ReplayingHostTrees,
    ReplayingRank,
    ReplayingTreeRank,
)
from tests.fakes.tiny_models import MIXTURES, save_tiny_model
from tests.unit.workers.engine.test_drafts_under_grammars import (
    CHAIN,
    CountedDrafts,
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_eagle import ALLOWED, DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_grammars import request_of, run_together
from tests.unit.workers.engine.test_mtp import save_target
from tests.unit.workers.engine.test_rank_drafts import DRAFT, check_replays, config_of
from tests.unit.workers.engine.test_speculation import assert_same, few_requests, finish
from workers import Engine
from workers.config import EngineConfig
from workers.constraints.mask_deadline import NEVER
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.paged_drafter_runner import PagedDrafterRunner
from workers.runner.rank_trees_runner import RankTreesRunner
from workers.sampling.params import SamplingParams
from workers.sampling.run_drafts import DeviceTreeDrafts, RunDrafts
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import IntArray
from workers.speculation.device_step import DrafterStep
from workers.speculation.proposer import DraftRows, Drafts

Rank = EagerTreeRank | ReplayingTreeRank
# Eager steps do what replayed ones do, so where both are asked they are at night.
BOTH = pytest.mark.parametrize(
    "rank_class", [pytest.param(EagerTreeRank, marks=pytest.mark.nightly), ReplayingTreeRank]
)
TREE: dict[str, Any] = {**DRAFT, "draft_tree": (3, 4, 2)}
SUFFIX_TREE: dict[str, Any] = {"speculative": "suffix", "draft_tree": (4, 3, 2)}


@pytest.mark.parametrize(
    ("rank_class", "settings"),
    [
        (EagerTreeRank, {"page_size": 4, "max_step_tokens": 24}),
        (ReplayingTreeRank, {"page_size": 1, "num_pages": 104, "max_running_requests": 6}),
    ],
    ids=["chunked", "replayed_and_retracted"],
)
def test_texts_are_the_same(
    plain: list[GenerateResult], rank_class: type[Rank], settings: dict[str, Any]
) -> None:
    """Drawn ones, penalties and log probabilities among them."""
    rank = rank_class(config_of(**TREE, **settings))
    engine = rank.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    check_replays(rank)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_pages" not in settings


@BOTH
def test_a_drafter_whose_logits_are_no_number_changes_no_text(rank_class: type[Rank]) -> None:
    """In narrower trees than the graph's, too: a row's drafts stand behind its own."""
    rank = rank_class(config_of(**TREE, max_running_requests=6))
    drafter = rank._device_drafter
    own = drafter.read_tree

    def read_tree(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, carried = own(*given)
        return torch.full_like(logits, torch.nan), carried

    drafter.read_tree = read_tree
    plain = run_limited(Engine.from_config(config_of()))
    assert_same(run_limited(rank.engine()), plain)
    assert rank_class is EagerTreeRank or rank.drafts.num_replays > 3


def run_limited(engine: Engine) -> list[GenerateResult]:
    """Requests whose trees have several shapes. The engine is closed."""
    sampling, collector = SamplingParams(temperature=0.0, max_tokens=24), ResultCollector()
    try:
        for index, most in enumerate((None, 5, 4, 7)):
            name, prompt = f"{index}", [*range(20, 40), 50 + index]
            engine.submit(GenerateRequest(name, prompt, sampling, max_draft_tokens=most))
            collector.expect(name)
        while collector.is_waiting or engine.has_work:
            collector.add(engine.step())
    finally:
        engine.close()
    return collector.results()


@pytest.mark.parametrize("has_graphs", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_trees_that_the_host_has_named_change_no_text(
    plain: list[GenerateResult], has_graphs: bool
) -> None:
    """Of places that end alike, over retraction."""
    asked = {**SUFFIX_TREE, "page_size": 2, "num_pages": 54}
    runner = ReplayingHostTrees(config_of(**asked, max_running_requests=6))
    if not has_graphs:
        runner._verify_graphs = None
    engine = runner.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    assert (runner.verifies.num_replays > 3) == has_graphs
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0


def test_chains_may_be_longer_than_trees_are_deep() -> None:
    """Where no row of a step may branch, as here under grammars, a lookup drafts as far as it
    likes: all drafts before one are seen in graphs, too."""
    requests = [request_of(index, CHAIN, temperature=0.0, max_tokens=80) for index in range(3)]
    runner = ReplayingHostTrees(config_of(**SUFFIX_TREE, max_running_requests=4))
    plain, drafted = Engine.from_config(config_of()), runner.engine()
    try:
        for engine in (plain, drafted):
            engine._patience.deadline = lambda plan: NEVER  # type: ignore[method-assign]
        assert_same(run_together(drafted, *requests), run_together(plain, *requests))
        stats = drafted.stats()
    finally:
        drafted.close()
        plain.close()
    assert runner.verifies.num_replays > 3
    assert stats.accepted_by_position[6] > 0


@BOTH
def test_masks_are_made_behind_drafts_beside_rows_with_trees(rank_class: type[Rank]) -> None:
    """Rows under grammars have chains; penalties and bad words look back along both."""
    plain = Engine.from_config(EngineConfig(device="cpu", num_cpu_threads=1))
    drafted = rank_class(config_of(**TREE, max_running_requests=7)).engine()
    counted = CountedDrafts(drafted)
    try:
        results = results_under_grammars(drafted)
        assert_same(results, results_under_grammars(plain))
    finally:
        drafted.close()
        plain.close()
    check_grammars(results)
    assert counted.num_allowed > 5


PAGES = {"page_size": 4, "num_pages": 40, "max_step_tokens": 64, "max_running_requests": 4}


@BOTH
def test_a_draft_that_is_the_target_is_always_right(rank_class: type[Rank]) -> None:
    """As deep as its tree is: whatever both keep of a path was brought in line."""
    settings = {"speculative": "draft:builtin", "page_size": 4, "num_pages": 60}
    rank = rank_class(config_of(draft_tree=(3, 2, 2), max_step_tokens=100, **settings))
    engine = rank.engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=1 + 4 * 5, ignore_eos=True)
    try:
        for _ in range(2):
            engine.generate([[*range(40, 75), 90 + index] for index in range(6)], sampling)
        stats = engine.stats()
    finally:
        engine.close()
    first, *_ = stats.accepted_by_position
    assert stats.accepted_by_position[:3] == (first, first, first)
    assert first == stats.num_drafted_runs > 40
    assert stats.num_cached_prompt_tokens > 0


def test_steps_that_run_eagerly_may_have_drafts_of_graphs(plain: list[GenerateResult]) -> None:
    """Where a row's tree is narrower than the graph's, its tokens stand elsewhere there."""
    rank = ReplayingTreeRank(config_of(**TREE, max_running_requests=6))
    rank._verify_graphs = None
    engine = rank.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
    finally:
        engine.close()
    assert rank.drafts.num_replays > 10


@BOTH
def test_steps_that_find_no_memory_run_in_halves(
    plain: list[GenerateResult], rank_class: type[Rank]
) -> None:
    """With the drafts that they had; paths are lined up half by half."""
    rank = rank_class(config_of(**TREE, max_running_requests=6))
    rank._is_alone = True
    sample, num_tried = rank._sampling.sample, list[int]()

    def exhausted_now_and_then(
        logits: torch.Tensor, slots: IntArray, lens: IntArray, drafts: RunDrafts | None = None
    ) -> SampledTokens:
        # One row alone would fail.
        if isinstance(drafts, DeviceTreeDrafts) and len({*slots.tolist()}) > 1:
            num_tried.append(len(slots))
        if len(num_tried) % 3 == 1:
            num_tried.append(0)
            raise torch.OutOfMemoryError("of this test")
        return sample(logits, slots, lens, drafts)

    rank._sampling.sample = exhausted_now_and_then
    results, stats = finish(rank.engine(), few_requests())
    assert_same(results, plain)
    assert len(num_tried) > 6
    assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("rank_class", "tree"),
    [
        pytest.param(EagerTreeRank, TREE, marks=pytest.mark.nightly),
        (ReplayingTreeRank, TREE),
        (ReplayingHostTrees, SUFFIX_TREE),
    ],
)
def test_paths_are_lined_up_where_memory_lacks(
    plain: list[GenerateResult],
    rank_class: type[Rank | ReplayingHostTrees],
    tree: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their step's samples have been counted for penalties by then: it must not run again."""
    runner = rank_class(config_of(**tree, max_running_requests=6))
    runner._is_alone = True
    index_select, num_lacking = torch.Tensor.index_select, list[int]()

    def without_room(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        is_of_all_layers = tensor.dim() == 4
        if is_of_all_layers:
            num_lacking.append(len(index))
            raise torch.OutOfMemoryError("of this test")
        return index_select(tensor, dim, index)

    engine = runner.engine()
    monkeypatch.setattr(torch.Tensor, "index_select", without_room)
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    assert len(num_lacking) > 6
    assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("rank_class", "tree"), [(ReplayingRank, ()), (ReplayingTreeRank, (3, 4, 2))]
)
def test_a_head_without_memory_behind_a_replay_makes_worse_drafts_only(
    plain: list[GenerateResult], rank_class: type[ReplayingRank], tree: tuple[int, ...]
) -> None:
    """The step has been sampled, and its tokens are counted and kept: it must not run again."""
    settings = {"speculative": "eagle3:builtin-head", "draft_tree": tree}
    rank = rank_class(config_of(**settings, max_running_requests=6))
    rank._is_alone = True
    drafter = rank._device_drafter
    own, num_tried = drafter.behind, list[int]()

    def exhausted_now_and_then(step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        num_tried.append(step.plan.step_id)
        if len(num_tried) % 3 == 0:
            raise torch.OutOfMemoryError("of this test")
        own(step, taps)

    drafter.behind = exhausted_now_and_then
    engine = rank.engine()
    try:
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    finally:
        engine.close()
    assert rank.verifies.num_replays > 3
    assert stats.num_accepted_draft_tokens > 0


Trees = dict[tuple[int, ...], tuple[list[int], list[int]]]
"""By the text that they go on from: drafts, and what each stands behind."""


def trees_of(rank: RankTreesRunner, engine: Engine) -> tuple[Trees, EngineStats]:
    """Of a run of the prompts. The engine is closed."""
    own, history, found = rank._make_drafts, engine._executor._runs._history, Trees()

    def make_drafts(step: DrafterStep) -> None:
        own(step)
        runs = step.runs
        rows = zip(runs.slots, runs.prefix_lens, runs.num_drafts, runs.firsts, strict=True)
        for slot, prefix_len, num_drafts, first in rows:
            text = tuple(history.token_ids[slot, : prefix_len + 1].tolist())
            own_drafts = slice(first + 1, first + 1 + num_drafts)
            if step.trees is not None:
                parents = (step.trees.parents[own_drafts] - first).tolist()
                found[text] = step.ids[own_drafts].tolist(), parents

    rank._make_drafts = make_drafts
    return found, run_prompts(engine)


def of_host(config: EngineConfig) -> Trees:
    runner = make_model_runner(config, SingleRank(), torch.device("cpu"), lambda done, total: None)
    assert isinstance(runner, PagedDrafterRunner)
    proposer, history, found = runner._proposer, runner._runs._history, Trees()
    own = proposer.propose

    def propose(rows: DraftRows) -> Drafts:
        drafts = own(rows)
        for row, (slot, num_drafts) in enumerate(zip(rows.slots, drafts.num_drafts, strict=True)):
            text = tuple(history.token_ids[slot, : rows.lens[row]].tolist())
            if drafts.parents is not None:
                parents = drafts.parents[row, :num_drafts].tolist()
                found[text] = drafts.token_ids[row, :num_drafts].tolist(), parents
        return drafts

    proposer.propose = propose
    run_prompts(Engine.of_runner(config, runner))
    return found


def run_prompts(engine: Engine) -> EngineStats:
    """Requests with whole trees, with narrower ones and with none, whose prompts are found in the
    cache the second time. The engine is closed."""
    collector = ResultCollector()
    try:
        for turn, limits in enumerate([(6, 5, 6, 0), (6, 6, 0, 6), (6, 6, 6, 6)]):
            for index, most in enumerate(limits):
                name, prompt = f"{turn}-{index}", [*range(20, 50), 60 + index]
                engine.submit(GenerateRequest(name, prompt, ALLOWED, max_draft_tokens=most))
                collector.expect(name)
            while collector.is_waiting or engine.has_work:
                collector.add(engine.step())
        return engine.stats()
    finally:
        engine.close()


def save_eagle(folder: Path) -> dict[str, Any]:
    target = save_tiny_model(DEEP, folder / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(folder / "head", own, DRAFT_IDS)
    return {"model": str(target), "speculative": f"eagle3:{head}"}


def save_mtp(folder: Path) -> dict[str, Any]:
    save_target(MIXTURES["glm4_moe"], folder)
    return {"model": str(folder), "speculative": "mtp"}


def save_nothing(folder: Path) -> dict[str, Any]:
    return {"speculative": "draft:builtin-draft"}


@BOTH
@pytest.mark.parametrize(
    ("save", "is_tied"), [(save_nothing, False), (save_eagle, False), (save_mtp, True)]
)
def test_trees_are_those_that_the_host_grows(
    save: Callable[[Path], dict[str, Any]], is_tied: bool, rank_class: type[Rank], tmp_path: Path
) -> None:
    """Over chunks, cached prefixes, drafts that held before, narrower trees and none: what a
    drafter keeps of a token stands where the path that held has it."""
    config = config_of(**save(tmp_path), draft_tree=(2, 3, 1), **PAGES)
    rank = rank_class(config)
    (made, stats), grown = trees_of(rank, rank.engine()), of_host(config)
    check_replays(rank)
    both = made.keys() & grown.keys()
    assert len(both) > 0.8 * len(made) > 16
    # The last of the layer's logits are often equal: a graph has other ones of them.
    assert sum(made[text] != grown[text] for text in both) <= (len(both) // 20 if is_tied else 0)
    assert {len(drafts) for drafts, _ in made.values()} >= {5, 6}
    assert len({tuple(parents) for _, parents in made.values()}) > 2
    assert stats.accepted_by_position[1] > 2
    assert stats.num_cached_prompt_tokens > 0
