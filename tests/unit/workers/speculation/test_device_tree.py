"""Trees that grow on a device are those that the host grows, and nobody waits for them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attention.visibility import Tree
from tests.unit.workers.speculation.test_ngram import int32
from workers.scheduler.plan import StepPlan
from workers.scheduler.plan_tree import PlanTrees, depths_of
from workers.speculation.device_tree import DeviceTrees, level_depths
from workers.speculation.draft_tree import grow_by_logits
from workers.speculation.tree import TreeVerifier
from workers.speculation.tree_shape import GrowingTree

CPU = torch.device("cpu")
NUM_ROWS, VOCAB = 5, 37
SHAPES = [(4, 4, 2), (8, 4, 2, 1, 1), (1, 1, 1), (1, 16)]


def logits_of(levels: Sequence[int], seed: int, is_coarse: bool) -> list[torch.Tensor]:
    """Of a tree's levels, behind newest tokens. is_coarse: many of them are equal."""
    draws = torch.Generator().manual_seed(seed)
    sizes = [(NUM_ROWS * newest, VOCAB) for newest in (1, *levels[:-1])]
    drawn = [2 * torch.randn(size, generator=draws) for size in sizes]
    return [own.round() for own in drawn] if is_coarse else drawn


def named(columns: torch.Tensor) -> torch.Tensor:
    return 1000 - 3 * columns


def tree_of(widths: Sequence[int], drawn: Sequence[torch.Tensor]) -> DeviceTrees:
    trees = DeviceTrees.of_roots(len(drawn[0]), drawn[0].device)
    for width, logits in zip(widths, drawn, strict=True):
        trees = trees.grown(logits, width, named)
    return trees


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("widths", SHAPES)
def test_levels_are_those_that_the_host_chooses(widths: tuple[int, ...], is_coarse: bool) -> None:
    for seed in range(20):
        on_host = [GrowingTree(widths) for _ in range(NUM_ROWS)]
        drawn = logits_of(widths, seed, is_coarse)
        on_device = tree_of(widths, drawn)
        for logits in drawn:
            grow_by_logits(on_host, logits, named)
        assert on_device.token_ids.tolist() == [one.token_ids for one in on_host]
        assert on_device.parents[:, 1:].tolist() == [one.parents for one in on_host]
        assert on_device.logprobs[:, 1:].tolist() == [one.logprobs for one in on_host]
        parents = [int32(-1, *one.parents) for one in on_host]
        assert on_device.sees.reshape(-1).equal(Tree.of_parents(parents, CPU).mask)
        assert all(depths_of(own).tolist() == level_depths(widths) for own in parents)


def test_parents_are_not_the_shapes() -> None:
    """Two texts have trees of one shape whose drafts stand behind others."""
    grown = [tree_of((4, 4, 2), logits_of((4, 4, 2), seed, False)) for seed in (1, 2)]
    assert not grown[0].parents.equal(grown[1].parents)


@pytest.mark.parametrize("widths", SHAPES)
def test_what_holds_is_what_the_host_finds(widths: tuple[int, ...]) -> None:
    """Paths to some token of each row, and others: there are some of all lengths."""
    draws = torch.Generator().manual_seed(3)
    num_tokens, run_lens = 1 + sum(widths), set()
    for seed in range(40):
        trees = tree_of(widths, logits_of(widths, seed, False))
        behind = torch.cat([torch.full((NUM_ROWS, 1), 7), trees.token_ids], dim=1)
        is_next = trees.parents[:, None, :] == torch.arange(num_tokens)[:, None]
        is_next[:, :, 0] = False
        goals = torch.randint(0, num_tokens, (NUM_ROWS,), generator=draws)
        is_on_path = trees.sees[torch.arange(NUM_ROWS), goals]
        marks = torch.rand(is_next.shape, generator=draws) + is_on_path[:, None, :].float()
        best, chosen = marks.masked_fill(~is_next, -1.0).max(dim=2)
        takes = (best > 1) | (best >= 0) & (torch.rand(best.shape, generator=draws) < 0.3)
        sampled = torch.where(takes, behind.gather(1, chosen), -5)
        plan = plan_of(behind, trees.parents)
        places = np.tile(np.arange(20, 20 + num_tokens, dtype=np.int32), NUM_ROWS)
        on_host = TreeVerifier().accept(
            sampled.flatten(), behind.flatten(), plan.samples, PlanTrees.of(plan, places)
        )
        held = trees.held(sampled)
        assert held.run_lens.equal(on_host.run_lens)
        assert held.order.equal(on_host.order)
        run_lens |= set(held.run_lens.tolist())
    assert run_lens == {*range(1, len(widths) + 2)}


def plan_of(behind: torch.Tensor, parents: torch.Tensor) -> StepPlan:
    """Rows of as many tokens, each with a tree."""
    num_rows, num_tokens = behind.shape
    of_rows = parents.numpy().astype(np.int32)
    of_rows[:, 0] = -1
    lens = np.full(num_rows, num_tokens, dtype=np.int32)
    return StepPlan(
        step_id=0,
        is_decode=False,
        slots=np.arange(num_rows, dtype=np.int32),
        num_new_tokens=lens,
        prefix_lens=np.full(num_rows, 20, dtype=np.int32),
        samples=lens,
        input_ids=behind.flatten().numpy().astype(np.int32),
        out_cache_loc=np.arange(behind.numel(), dtype=np.int32),
        parents=of_rows.flatten(),
    )


@pytest.mark.parametrize("widths", SHAPES)
def test_nothing_depends_on_what_a_device_holds(widths: tuple[int, ...]) -> None:
    """Tensors without values: whoever asks for one raises, as a capture would."""
    num_tokens = 1 + sum(widths)
    with FakeTensorMode():
        drawn = [torch.empty(NUM_ROWS * newest, VOCAB) for newest in (1, *widths[:-1])]
        trees = tree_of(widths, drawn)
        held = trees.held(torch.zeros((NUM_ROWS, num_tokens), dtype=torch.int64))
        assert trees.sees.shape == (NUM_ROWS, num_tokens, num_tokens)
        assert held.order.shape == (NUM_ROWS * num_tokens,)
        with pytest.raises(DataDependentOutputException):
            held.order[0].item()
