"""Tokens that a grammar does not allow, ruled out of a step's logits."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.constraints.masks import WORD_BITS, StepMasks
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray


def find_masks(
    slots: IntArray, positions: IntArray, masks: StepMasks
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which rows have a mask and which one, int64 (m,) both. slots, positions: of the rows, host
    int32 (n,), no two alike. A half of a step has masks of the other half, too."""
    _, rows, own = np.intersect1d(
        _places(slots, positions), _places(masks.slots, masks.positions), return_indices=True
    )
    return rows, own


def rule_out(logits: Tensor, slots: IntArray, positions: IntArray, masks: StepMasks) -> Tensor:
    """logits (n, vocab_size) of tokens at positions of slots, host int32 (n,), in float32: -inf for
    tokens that masks rule out. Rows without a mask keep all of theirs."""
    rows, own = find_masks(slots, positions, masks)
    if not len(rows):
        return logits
    indices, words = upload([rows, masks.rows[own]], logits.device)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = (words.unsqueeze(-1) >> bits & 1).view(len(rows), -1)[:, : logits.shape[1]] != 0
    allowed = logits.to(torch.float32, copy=True)
    ruled_out = allowed.index_select(0, indices).masked_fill_(~is_allowed, -torch.inf)
    return allowed.index_copy_(0, indices, ruled_out)


def _places(slots: IntArray, positions: IntArray) -> npt.NDArray[np.int64]:
    return (slots.astype(np.int64) << 32) + positions
