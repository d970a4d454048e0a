"""Heads that read plain steps within the target's graphs: what they keep, and what they draft from
it, is what they make of eager steps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.forward_batch import ForwardBatch
from tests.fakes.eagle_heads import save_head
from tests.fakes.rank_drafts import EagerRank, EagerTreeRank, ReplayingRank, ReplayingTreeRank
from tests.fakes.tiny_models import MIXTURES, save_tiny_model
from tests.unit.workers.engine.test_eagle import ALLOWED, DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_mtp import save_target
from tests.unit.workers.engine.test_rank_drafts import config_of
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.graphs.tapped_model import TappedModel
from workers.runner.rank_drafts_runner import RankDraftsRunner
from workers.sampling.params import SamplingParams
from workers.scheduler import scheduler
from workers.scheduler.plan import StepPlan
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.device_step import DrafterStep
from workers.speculation.policy import FixedLength

PAGE_SIZE = 4
LENGTHS = (0, 0, 3, 0, 3, 3, 0, 0, 0)
SETTINGS: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "num_pages": 26,
    "max_step_tokens": 24,
    "max_running_requests": 5,
}
"""Few pages, so that requests are retracted; five rows in graphs of one, four and five."""
PROMPTS = [[9], *([*range(20, 30 + 5 * index), 60 + index] for index in range(5)), [7]]
"""The first token of a text is a decode row, too."""
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=13, allowed_token_ids=DRAFT_IDS)


class AlternatingLength(FixedLength):
    """Plain steps and such with drafts, whatever they take."""

    def __init__(self) -> None:
        super().__init__(max(LENGTHS))
        self._lengths = cycle(LENGTHS)

    def choose(self, most: Any) -> int:
        return next(self._lengths)


@dataclass(frozen=True, slots=True)
class Ran:
    """drafts: of each step that had some, its number, its tokens and what they stand behind.
    states, kept: of the head. num_behind: how often it read a plain step behind it."""

    results: list[GenerateResult]
    drafts: list[tuple[int, list[int], list[int]]]
    states: torch.Tensor
    kept: tuple[torch.Tensor, ...]
    stats: EngineStats
    num_behind: int


def run(rank: RankDraftsRunner, engine: Engine, named: Any) -> Ran:
    """The prompts twice, so that the second time finds them in the cache."""
    drafter, num_behind = rank._device_drafter, 0
    assert isinstance(drafter, DevicePairs)
    behind = drafter.behind

    def counted(step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        nonlocal num_behind
        num_behind += step.plan.is_decode
        behind(step, taps)

    drafter.behind = counted  # type: ignore[method-assign]
    collector = ResultCollector()
    try:
        for turn in range(2):
            for index, prompt in enumerate(PROMPTS):
                name, sampling = f"{turn}-{index}", DRAWN if index == 3 else ALLOWED
                engine.submit(GenerateRequest(name, prompt, sampling))
                collector.expect(name)
                if len(prompt) == 1:
                    collector.add(engine.step())
            while collector.is_waiting or engine.has_work:
                collector.add(engine.step())
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    tensors = drafter._pool.tensors()
    return Ran(collector.results(), named, drafter._states, tensors, stats, num_behind)


def recorded(rank: RankDraftsRunner, config: EngineConfig) -> Ran:
    """Drafts as the host learns of them."""
    named, own = list[tuple[int, list[int], list[int]]](), rank._mailbox.named

    def recording(plan: StepPlan) -> StepPlan:
        found = own(plan)
        named.append((plan.step_id, found.input_ids.tolist(), found.parents.tolist()))
        return found

    rank._mailbox.named = recording  # type: ignore[method-assign]
    return run(rank, Engine.of_runner(config, rank), named)


class ReadRows:
    """Counts rows that graphs read: first tokens of texts, and such as pad a batch."""

    def __init__(self, rank: ReplayingRank, padding_slot: int) -> None:
        self.num_first = self.num_padding = 0
        assert rank._graphs is not None, "plain steps have graphs"
        while rank._graphs.capture_next():
            pass
        model = rank._graphs._model
        assert isinstance(model, TappedModel)
        take = model._take

        def counted(batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
            is_padding = batch.req_pool_indices == padding_slot
            self.num_padding += int(is_padding.sum())
            self.num_first += int(((batch.positions == 0) & ~is_padding).sum())
            take(batch, taps)

        model._take = counted


def save_eagle(folder: Path) -> dict[str, Any]:
    target = save_tiny_model(DEEP, folder / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(folder / "head", own, DRAFT_IDS)
    return {"model": str(target), "speculative": f"eagle3:{head}"}


def save_mtp(folder: Path) -> dict[str, Any]:
    save_target(MIXTURES["glm4_moe"], folder)
    return {"model": str(folder), "speculative": "mtp"}


CASES = {
    "eagle": (save_eagle, {}, EagerRank, ReplayingRank),
    "eagle_trees": (save_eagle, {"draft_tree": (2, 2, 1)}, EagerTreeRank, ReplayingTreeRank),
    "mtp": (save_mtp, {}, EagerRank, ReplayingRank),
}


def compare(ran: Ran, wanted: Ran, first_index: int) -> None:
    """Of what is kept all but the dummy page, which ends before first_index."""
    assert ran.drafts == wanted.drafts
    assert [one.token_ids for one in ran.results] == [one.token_ids for one in wanted.results]
    torch.testing.assert_close(ran.states[first_index:], wanted.states[first_index:])
    for own, other in zip(ran.kept, wanted.kept, strict=True):
        torch.testing.assert_close(own[:, first_index:].float(), other[:, first_index:].float())


@pytest.mark.parametrize("case", CASES)
def test_drafts_behind_plain_steps_are_those_of_eager_ones(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over mixed batches, padded ones, chunks, cached prefixes, retraction, slots that change hands
    and drafts before, right and wrong."""
    save, settings, eager_class, replaying_class = CASES[case]
    monkeypatch.setattr(scheduler, "make_policy", lambda *config: AlternatingLength())
    config = config_of(**save(tmp_path), **{**SETTINGS, **settings})
    wanted = recorded(eager_class(config), config)
    rank = replaying_class(config)
    rows = ReadRows(rank, config.max_running_requests)
    ran = recorded(rank, config)
    compare(ran, wanted, PAGE_SIZE)
    assert rank.decodes.num_replays > 10
    # Captures run once more.
    assert rank.side.events.count("fork") >= rank.decodes.num_replays
    assert ran.num_behind < wanted.num_behind - 10
    assert len(ran.drafts) > 10
    assert rows.num_first > 0
    assert rows.num_padding > 10
    assert 0 < ran.stats.num_accepted_draft_tokens < ran.stats.num_draft_tokens
    assert ran.stats.num_preemptions > 0
    assert ran.stats.num_cached_prompt_tokens > 0
