"""From adjusted logits to token ids: greedy, or random by Gumbel-max, row by row of a batch.

Knows tensors of per-row parameters, not requests nor slots. Adding independent standard Gumbel
noise to logits and taking the argmax draws exactly from their softmax (Gumbel 1954; Maddison et
al., "A* sampling", 2014). A row's path and arithmetic depend on its own parameters only, never on
its neighbours', so that a seeded request draws the same tokens from equal logits in every batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling.filters import (
    mask_min_p_,
    mask_sorted_,
    mask_top_k_,
    mask_top_p_,
    scale_by_temperature,
)
from workers.sampling.noise import negative_gumbel
from workers.sampling.slot_parameters import MAX_CANDIDATE_TOP_K

# A fixed width keeps a row's arithmetic independent of the others' top_k; the excess over the
# largest top_k leaves room for tokens that tie with the k-th.
_NUM_CANDIDATES = 2 * MAX_CANDIDATE_TOP_K


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some rows of a batch. indices: int64 (m,), ascending. is_all: they are the whole batch."""

    indices: Tensor
    is_all: bool

    def take(self, rows: Tensor) -> Tensor:
        """The group's rows of a tensor (n, ...): itself if they are all, else a copy (m, ...)."""
        return rows if self.is_all else rows.index_select(0, self.indices)

    def put_(self, target: Tensor, rows: Tensor) -> Tensor:
        """target (n, ...) with the group's rows replaced, in place unless they are all."""
        return rows if self.is_all else target.index_copy_(0, self.indices, rows)


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Parameters of n rows. All are (n, 1) but noise_keys, int32 (n, 2).

    temperature: float32, above 0. top_k: int64, in [1, vocab]. top_p: float32, TOP_P_OFF for none.
    log_min_p: float32, -inf for none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    noise_keys: Tensor


@dataclass(frozen=True, slots=True)
class FilterGroups:
    """Which of the dense rows use a filter, None for none; indices count dense rows only."""

    min_p: RowGroup | None
    top_k: RowGroup | None
    top_p: RowGroup | None


def sample_candidates(logits: Tensor, params: RowParameters) -> Tensor:
    """Token ids int64 (n,) of rows with top_k <= MAX_CANDIDATE_TOP_K, from float32 (n, vocab).

    Only the likeliest tokens are looked at; more than _NUM_CANDIDATES - top_k tokens equal to the
    k-th are not all kept.
    """
    values, token_ids = logits.topk(min(_NUM_CANDIDATES, logits.shape[1]), dim=-1)
    scaled = scale_by_temperature(values, values[:, :1], params.temperature)
    mask_min_p_(scaled, params.log_min_p)
    mask_sorted_(scaled, params.top_k, params.top_p)
    scaled -= negative_gumbel(token_ids.to(torch.int32), params.noise_keys)
    return token_ids.gather(1, scaled.argmax(dim=-1, keepdim=True)).squeeze(1)


def sample_dense(
    logits: Tensor, row_max: Tensor, params: RowParameters, filters: FilterGroups
) -> Tensor:
    """Token ids int64 (n,) of rows that may draw any token, from float32 (n, vocab).

    row_max: (n, 1). Each filter costs only the rows that use it.
    """
    scaled = scale_by_temperature(logits, row_max, params.temperature)
    steps = (
        (filters.min_p, mask_min_p_, params.log_min_p),
        (filters.top_k, mask_top_k_, params.top_k),
        (filters.top_p, mask_top_p_, params.top_p),
    )
    for group, mask_, values in steps:
        if group is not None:
            scaled = group.put_(scaled, mask_(group.take(scaled), group.take(values)))
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scaled -= negative_gumbel(token_ids, params.noise_keys)
    return scaled.argmax(dim=-1)
