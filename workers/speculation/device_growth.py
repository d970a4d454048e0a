"""Trees of drafts on a rank's device: one pass of a drafter a depth, which reads the tree so far.

Few tokens, of which a later one may not see all earlier ones, as it would if they were cached.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch
from attention.visibility import CAUSAL, Tree, Visibility
from workers.sampling.transfer import upload
from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.step_trees import StepTrees
from workers.speculation.tree_kernels import TreeKernels
from workers.speculation.tree_levels import TreeLevel, tree_levels
from workers.speculation.tree_shape import level_depths

BatchOf = Callable[[DeviceTrees, TreeLevel], ForwardBatch]
"""Of a pass over trees so far, whose ids are the batch's, row after row."""


class TreeDrafter(ChainDrafter, Protocol):
    """What is the same in every pass of a drafter of trees."""

    @property
    def kernels(self) -> TreeKernels:
        """Of its device."""
        ...

    @property
    def names(self) -> torch.Tensor | None:
        """Ids of the tokens that columns of logits are of, int64 (columns,); None: they are."""
        ...

    def read_tree(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Trees so far, int64 (n,), with what a pass has handed over for the token before each, (n,
        size). newest: int64 (m,), which of them are of the last level -> logits behind
        these, (m, tokens that may be proposed), and what is handed on for each of the n."""
        ...


def grow_trees(
    drafter: TreeDrafter,
    roots: torch.Tensor,
    carried: torch.Tensor,
    levels: Sequence[TreeLevel],
    batch_of: BatchOf,
    own_widths: torch.Tensor | None = None,
) -> DeviceTrees:
    """Trees of one shape behind roots, int64 (n,). carried: (n, size), what goes with these.
    levels: of that shape. own_widths: int64 (n, len(levels) - 1), how many of its first drafts at
    each depth a row has, none behind a depth with none; the others are any, and nothing of a row's
    own stands behind them. None: all have all. Nothing depends on what the device holds: a graph
    can have all of it.
    """
    n, size = carried.shape
    trees = DeviceTrees.of_roots(roots)
    states, made = carried, carried.new_empty((n, 0, size))
    for index, level in enumerate(levels[:-1]):
        if index:
            states = drafter.kernels.carry(carried, made, trees.parents)
        batch = batch_of(trees, level)
        newest = level.newest[: n * level.num_newest]
        logits, own = drafter.read_tree(batch.input_ids, states, batch, newest)
        made = own.view(n, level.num_tokens, size)
        num_parents = own_widths[:, index - 1] if own_widths is not None and index else None
        width = levels[index + 1].num_newest
        trees = drafter.kernels.grow(trees, logits, width, drafter.names, num_parents)
    return trees


def draft_trees(
    drafter: TreeDrafter, passes: DevicePasses, step: DrafterStep, of_step: StepTrees
) -> DeviceDrafts:
    """Drafts of the step's runs. Rows whose trees have one shape share their passes."""
    runs, device = step.runs, step.ids.device
    step.place_tokens()
    token_ids, parents = torch.zeros((2, len(runs), runs.width), dtype=torch.int64, device=device)
    for widths, rows in _by_shape(step, of_step).items():
        (index,) = upload([rows], device)
        grown = _grown(drafter, passes, step, rows, widths)
        num_drafts = sum(widths)
        token_ids[:, :num_drafts].index_copy_(0, index, grown.token_ids)
        parents[:, :num_drafts].index_copy_(0, index, grown.parents[:, 1:])
    return DeviceDrafts(token_ids, parents)


def _grown(
    drafter: TreeDrafter,
    passes: DevicePasses,
    step: DrafterStep,
    rows: npt.NDArray[np.int64],
    widths: tuple[int, ...],
) -> DeviceTrees:
    """rows: of the step's runs."""
    runs = step.runs
    slots, firsts = runs.slots[rows], runs.firsts[rows]
    prefix_lens = runs.prefix_lens[rows] - np.int32(drafter.first_position)
    depths = np.array(level_depths(widths), dtype=np.int32)

    def batch_of(trees: DeviceTrees, level: TreeLevel) -> ForwardBatch:
        num_tokens = level.num_tokens
        tokens = (firsts[:, None] + np.arange(num_tokens)).reshape(-1)
        pass_rows = PassRows(
            slots,
            prefix_lens,
            np.full(len(rows), num_tokens, dtype=np.int32),
            step.plan.out_cache_loc[tokens],
            np.tile(depths[:num_tokens], len(rows)),
        )
        return passes.prepare(pass_rows, trees.ids.view(-1), visibility_of(trees, level))

    device = step.ids.device
    (tokens,) = upload([firsts], device)
    roots = step.ids.index_select(0, tokens)
    own_slots, places = (own.index_select(0, tokens) for own in (step.token_slots, step.places))
    carried = drafter.carried_to(own_slots, places - drafter.first_position)
    levels = tree_levels(widths, len(rows), device)
    return grow_trees(drafter, roots, carried, levels, batch_of)


def visibility_of(trees: DeviceTrees, level: TreeLevel) -> Visibility:
    """Of a pass over all tokens of these."""
    if level.num_tokens == 1:
        return CAUSAL
    return Tree(trees.sees.view(-1), level.starts[: len(trees.sees)])


def _by_shape(
    step: DrafterStep, of_step: StepTrees
) -> dict[tuple[int, ...], npt.NDArray[np.int64]]:
    """Which of the step's runs have trees of each shape, ascending."""
    found: dict[tuple[int, ...], list[int]] = {}
    for run, row in enumerate(step.runs.rows.tolist()):
        found.setdefault(of_step.widths(row), []).append(run)
    return {widths: np.array(runs, dtype=np.int64) for widths, runs in found.items()}
