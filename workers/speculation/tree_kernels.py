"""What grows trees of drafts on one kind of device."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from workers.speculation.device_tree import DeviceTrees
from workers.speculation.step_trees import LinedUp, StepTrees, hold_paths

GrowLevel = Callable[
    [DeviceTrees, torch.Tensor, int, torch.Tensor | None, torch.Tensor | None], DeviceTrees
]
"""As DeviceTrees.grown, of trees and its arguments. Launches only."""

CarryStates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What trees' tokens are read with, (n * m, size): carried (n, size) with roots, and with drafts
what a pass made of their parents, made (n, up to m, size). parents: int64 (n, m), as of
DeviceTrees. Launches only."""


def carry_states(carried: torch.Tensor, made: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """CarryStates in plain torch, on any device: the reference of a faster one."""
    (n, num_tokens), size = parents.shape, carried.shape[1]
    sources = parents[:, 1:].unsqueeze(2).expand(-1, -1, size)
    return torch.cat([carried.unsqueeze(1), made.gather(1, sources)], dim=1).view(
        n * num_tokens, size
    )


HoldPaths = Callable[[StepTrees, torch.Tensor, torch.Tensor, torch.Tensor], LinedUp]
"""What holds of a step's trees: what was drawn behind each of its tokens, int32 or int64; what
these are and their cache indices, int64; (num_tokens,) each. Drafts behind one token differ.
Launches only."""

FindBefore = Callable[
    [StepTrees, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]
"""Who stands before a step's tokens: positions, places, slots and cache indices of these, int64
(num_tokens,) each, and the table, int32 (num_slots, max_context_len) -> positions and cache indices
of their parents, of roots of what the slot has before them; 0 and any where nothing is. Launches
only."""


def find_before(
    trees: StepTrees,
    positions: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    cache_indices: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FindBefore in plain torch, on any device."""
    of_slots = table[slots, (places - 1).clamp_(min=0)].long()
    own = torch.arange(len(positions), device=positions.device)
    of_parents = cache_indices.index_select(0, trees.parents)
    indices = torch.where(trees.parents == own, of_slots, of_parents)
    return (positions - 1).clamp_(min=0), indices


class TreeKernels(NamedTuple):
    grow: GrowLevel
    carry: CarryStates
    hold: HoldPaths
    before: FindBefore


TORCH_TREE_KERNELS = TreeKernels(DeviceTrees.grown, carry_states, hold_paths, find_before)
