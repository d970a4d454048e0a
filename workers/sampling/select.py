"""Weighted selection along rows without a sort: radix select over the bits of the values.

Knows non-positive floats and weights only. Weights are integers, so their sums, and with them the
result, do not depend on the order in which a device adds: a row's answer is the same in any batch.
"""

import torch
from torch import Tensor

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""(shift, width) of the key's digits, most significant first: 31 bits in all."""


def descending_keys(values: Tensor) -> Tensor:
    """int32 keys in [0, 0x7F800000] that ascend as values, float32 in [-inf, 0], descend."""
    return values.abs().view(torch.int32)


def select_key(keys: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    """The smallest key whose own and smaller keys' weights reach the target, int32 (n, 1).

    keys: int32 (n, k), not negative. weights: int64 (n, k), not negative. targets: int64 (n, 1);
    one that the whole row does not reach yields the largest int32.
    """
    selected = torch.zeros_like(targets, dtype=torch.int32)
    for shift, width in _DIGITS:
        # Bin 0 takes all keys below the selected prefix, the last bin all that lie beyond it, so
        # that a bin's cumulated weight is that of all keys up to it.
        bins = ((keys - selected) >> shift).clamp_(-1, 1 << width).to(torch.int64).add_(1)
        histogram = weights.new_zeros(len(keys), (1 << width) + 2).scatter_add_(1, bins, weights)
        digit = (histogram.cumsum(dim=-1) < targets).sum(dim=-1, keepdim=True).sub_(1)
        selected += digit.clamp_(0, (1 << width) - 1) << shift
    return selected
