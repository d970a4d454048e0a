"""What a head keeps of a tree's tokens beside keys and values, lined up where memory lacks."""

import pytest
import torch

from tests.fakes.rank_drafts import ReplayingTreeRank
from tests.unit.workers.engine.test_rank_drafts import config_of
from tests.unit.workers.engine.test_speculation import assert_same, few_requests, finish
from workers.engine.results import GenerateResult
from workers.speculation.device_pair_tree import DevicePairTree
from workers.speculation.step_trees import LinedUp, StepTrees


def test_states_are_lined_up_where_memory_lacks(
    plain: list[GenerateResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their step's samples have been counted for penalties by then: it must not run again."""
    rank = ReplayingTreeRank(
        config_of(speculative="eagle3:builtin-head", draft_tree=(3, 4, 2), max_running_requests=6)
    )
    rank._is_alone = True
    drafter = rank._device_drafter
    assert isinstance(drafter, DevicePairTree)
    index_select, line_up = torch.Tensor.index_select, drafter.line_up
    size, num_lacking = drafter._states.shape, list[int]()

    def without_room(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        if tensor.shape == size:
            num_lacking.append(len(index))
            raise torch.OutOfMemoryError("of this test")
        return index_select(tensor, dim, index)

    def line_up_without_room(trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "index_select", without_room)
            line_up(trees, lined, targets)

    monkeypatch.setattr(drafter, "line_up", line_up_without_room)
    results, stats = finish(rank.engine(), few_requests())
    assert_same(results, plain)
    assert len(num_lacking) > 6
    assert stats.num_accepted_draft_tokens > 0
