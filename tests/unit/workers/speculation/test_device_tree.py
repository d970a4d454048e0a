"""Trees that grow on a device are those that the host grows, and nobody waits for them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attention.visibility import Tree
from tests.unit.workers.speculation.test_ngram import int32
from workers.sampling.run_drafts import DeviceTreeDrafts, RunDrafts
from workers.scheduler.plan import StepPlan
from workers.scheduler.plan_tree import PlanTrees, depths_of
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.draft_tree import grow_by_logits
from workers.speculation.runs import ranges
from workers.speculation.step_trees import StepTrees, sees_ancestors
from workers.speculation.tree import TreeVerifier
from workers.speculation.tree_shape import GrowingTree, level_depths, level_parents

CPU = torch.device("cpu")
NUM_ROWS, VOCAB = 5, 37
SHAPES = [(4, 4, 2), (8, 4, 2, 1, 1), (1, 1, 1), (1, 16)]


def logits_of(levels: Sequence[int], seed: int, is_coarse: bool) -> list[torch.Tensor]:
    """Of a tree's levels, behind newest tokens. is_coarse: many of them are equal."""
    draws = torch.Generator().manual_seed(seed)
    sizes = [(NUM_ROWS * newest, VOCAB) for newest in (1, *levels[:-1])]
    drawn = [2 * torch.randn(size, generator=draws) for size in sizes]
    return [own.round() for own in drawn] if is_coarse else drawn


NAMES = 1000 - 3 * torch.arange(VOCAB)


def named(columns: torch.Tensor) -> torch.Tensor:
    return NAMES[columns]


def tree_of(widths: Sequence[int], drawn: Sequence[torch.Tensor]) -> DeviceTrees:
    trees = DeviceTrees.of_roots(torch.zeros(len(drawn[0]), dtype=torch.int64))
    for width, logits in zip(widths, drawn, strict=True):
        trees = trees.grown(logits, width, torch.arange(1000, 1000 - 3 * VOCAB, -3))
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
        wanted = torch.tensor([one.logprobs for one in on_host], dtype=torch.float64)
        assert torch.allclose(on_device.logprobs[:, 1:], wanted, atol=1e-5)
        parents = [int32(-1, *one.parents) for one in on_host]
        assert on_device.sees.reshape(-1).equal(Tree.of_parents(parents, CPU).mask)
        assert all(depths_of(own).tolist() == level_depths(widths) for own in parents)


def test_parents_are_not_the_shapes() -> None:
    """Two texts have trees of one shape whose drafts stand behind others."""
    grown = [tree_of((4, 4, 2), logits_of((4, 4, 2), seed, False)) for seed in (1, 2)]
    assert not grown[0].parents.equal(grown[1].parents)


def plan_of(parents: list[list[int]]) -> StepPlan:
    """Rows with trees, or none: parents of their drafts as they were made."""
    rows = [int32(-1, *own) for own in parents]
    lens = int32(*map(len, rows))
    shapes = [level_parents(np.bincount(depths_of(own))[1:]) for own in rows]
    return StepPlan(
        step_id=0,
        is_decode=False,
        slots=np.arange(len(rows), dtype=np.int32),
        num_new_tokens=lens,
        prefix_lens=np.full(len(rows), 20, dtype=np.int32),
        samples=lens,
        input_ids=np.arange(lens.sum(), dtype=np.int32),
        out_cache_loc=np.arange(lens.sum(), dtype=np.int32),
        parents=np.concatenate([int32(-1, *own) for own in shapes]),
    )


def step_trees(plan: StepPlan, parents: list[list[int]]) -> tuple[StepTrees, PlanTrees]:
    """As a rank has them, which was told shapes alone, and as they are."""
    places = ranges(plan.prefix_lens, plan.num_new_tokens).astype(np.int32)
    of_step = StepTrees.of(plan, places, CPU)
    named = [int32(-1, *own) for own in parents]
    real = PlanTrees.of(msgspec.structs.replace(plan, parents=np.concatenate(named)), places)
    of_step.parents.copy_(torch.from_numpy(real.parents))
    return of_step, real


PARENTS = [[0, 0, 2, 1, 2, 4], [0, 1, 2], [], [0, 0, 0, 3, 3]]
"""Rows of two levels of three, a chain, one without drafts, and another shape."""


def test_a_step_knows_depths_before_and_paths_once_its_drafts_are_named() -> None:
    of_step, real = step_trees(plan_of(PARENTS), PARENTS)
    assert of_step.shape.depths.tolist() == real.depths.tolist()
    assert of_step.shape.positions.tolist() == real.positions.tolist()
    assert [of_step.widths(row) for row in range(4)] == [(2, 3, 1), (1, 1, 1), (), (3, 2)]
    whole = Tree.of_parents(real.rows, CPU)
    found = of_step.visibility()
    assert (found.mask.tolist(), found.starts.tolist()) == (
        whole.mask.tolist(),
        whole.starts.tolist(),
    )


def test_what_looks_back_follows_paths_that_the_host_does_not_know() -> None:
    plan = plan_of(PARENTS)
    of_step, real = step_trees(plan, PARENTS)
    ids = torch.arange(100, 100 + plan.num_tokens)
    unknown = RunDrafts.of(plan, of_step.shape)
    told = msgspec.structs.replace(plan, input_ids=ids.numpy().astype(np.int32))
    for rows in (np.arange(plan.num_tokens), np.array([0, 1, 2, 7, 8])):
        drafts = DeviceTreeDrafts.of_trees(unknown, ids, of_step.parents)
        (found,), (wanted,) = drafts.before(rows, CPU), RunDrafts.of(told, real).before(rows, CPU)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_holds_is_what_the_host_finds() -> None:
    """Samples that are some draft behind the token, or none: paths of all lengths."""
    plan, run_lens = plan_of(PARENTS), set[int]()
    of_step, real = step_trees(plan, PARENTS)
    ids, draws = torch.from_numpy(plan.input_ids).long(), torch.Generator().manual_seed(3)
    for _ in range(60):
        marks = torch.rand((len(ids), len(ids)), generator=draws)
        is_next = of_step.parents == torch.arange(len(ids))[:, None]
        best, chosen = marks.masked_fill(~is_next | torch.eye(len(ids)).bool(), -1).max(dim=1)
        sampled = torch.where(best > 0.3, ids[chosen], -5)
        held = of_step.held(sampled, ids)
        on_host = TreeVerifier().accept(sampled, ids, plan.samples, real)
        assert held.run_lens.equal(on_host.run_lens)
        assert held.order.equal(on_host.order)
        run_lens |= set(held.run_lens.tolist())
    assert run_lens == {1, 2, 3, 4}


@pytest.mark.parametrize("widths", SHAPES)
def test_nothing_depends_on_what_a_device_holds(widths: tuple[int, ...]) -> None:
    """Tensors without values: whoever asks for one raises, as a capture would."""
    num_tokens = 1 + sum(widths)
    with FakeTensorMode():
        drawn = [torch.empty(NUM_ROWS * newest, VOCAB) for newest in (1, *widths[:-1])]
        trees = tree_of(widths, drawn)
        parents = (trees.parents + torch.arange(NUM_ROWS)[:, None] * num_tokens).view(-1)
        firsts = torch.arange(NUM_ROWS * num_tokens) // num_tokens * num_tokens
        sees = sees_ancestors(parents, firsts, num_tokens)
        assert trees.sees.shape == (NUM_ROWS, num_tokens, num_tokens)
        assert sees.shape == (NUM_ROWS * num_tokens, num_tokens)
        with pytest.raises(DataDependentOutputException):
            trees.parents[0, -1].item()
