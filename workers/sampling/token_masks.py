"""Tokens that a grammar does not allow, ruled out of a step's logits."""

import numpy as np
import torch
from torch import Tensor

from workers.constraints.masks import WORD_BITS, StepMasks
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray


def rule_out(logits: Tensor, slots: IntArray, masks: StepMasks) -> Tensor:
    """logits (n, vocab_size) of slots, host int32 (n,), each once, in float32: -inf for tokens that
    masks rule out. Slots without a mask keep all of theirs; masks of other slots are left out."""
    _, rows, own = np.intersect1d(slots, masks.slots, return_indices=True)
    if not len(rows):
        return logits
    indices, words = upload([rows.astype(np.int64), masks.rows[own]], logits.device)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = (words.unsqueeze(-1) >> bits & 1).view(len(rows), -1)[:, : logits.shape[1]] != 0
    allowed = logits.to(torch.float32, copy=True)
    ruled_out = allowed.index_select(0, indices).masked_fill_(~is_allowed, -torch.inf)
    return allowed.index_copy_(0, indices, ruled_out)
