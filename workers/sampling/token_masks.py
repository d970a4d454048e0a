"""Tokens that a grammar does not allow, ruled out of a step's logits."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.constraints.masks import WORD_BITS, StepMasks
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray

_NONE = np.empty(0, dtype=np.int64)


class FoundMasks(NamedTuple):
    """rows: which rows of a step have a mask, and own: which one, int64 (m,) both. void: rows that
    should have one and have none, int64 (k,): what they sample is nobody's."""

    rows: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]
    void: npt.NDArray[np.int64]


def find_masks(
    slots: IntArray, positions: IntArray, masked_slots: IntArray, masks: StepMasks
) -> FoundMasks:
    """slots, positions: of the rows, host int32 (n,), no two alike. masked_slots: those that wait
    for masks. A half of a step has masks and masked slots of the other half, too."""
    is_void = _are_among(slots, masked_slots)
    if not len(masks.slots):
        return FoundMasks(_NONE, _NONE, np.flatnonzero(is_void))
    wanted, there = _places(slots, positions), _places(masks.slots, masks.positions)
    order = np.argsort(there)
    behind = np.searchsorted(there, wanted, sorter=order)
    nearest = order[np.minimum(behind, len(there) - 1)]
    rows = np.flatnonzero(there[nearest] == wanted)
    is_void[rows] = False
    return FoundMasks(rows, nearest[rows], np.flatnonzero(is_void))


def rule_out(logits: Tensor, found: FoundMasks, masks: StepMasks) -> Tensor:
    """logits (n, vocab_size) of the rows that masks were found for, in float32: -inf for tokens
    that these rule out. Rows without a mask keep all of theirs."""
    rows = found.rows
    if not len(rows):
        return logits
    indices, words = upload([rows, masks.rows[found.own]], logits.device)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = (words.unsqueeze(-1) >> bits & 1).view(len(rows), -1)[:, : logits.shape[1]] != 0
    allowed = logits.to(torch.float32, copy=True)
    ruled_out = allowed.index_select(0, indices).masked_fill_(~is_allowed, -torch.inf)
    return allowed.index_copy_(0, indices, ruled_out)


def _places(slots: IntArray, positions: IntArray) -> npt.NDArray[np.int64]:
    return (slots.astype(np.int64) << 32) + positions


def _are_among(slots: IntArray, others: IntArray) -> npt.NDArray[np.bool_]:
    """Slots are few: a table of all takes less than sorting some."""
    table = np.zeros(1 + max(slots.max(initial=-1), others.max(initial=-1)), dtype=np.bool_)
    table[others] = True
    return table[slots]
