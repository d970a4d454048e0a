"""What a step's attention must at least read and compute, and how close a measured time comes.

Pure arithmetic on host copies of lengths. Counts the attention proper: K and V read once per row
and layer, and the two products of the visible scores; no projections, no writes, no softmax.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention.config import AttentionConfig

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Bytes of K and V read and floating-point operations (a multiply-add is two)."""

    bytes_read: int
    flops: int


@dataclass(frozen=True, slots=True)
class HardwareLimits:
    """What the device can do at best, measured or from its data sheet."""

    bytes_per_s: float
    flops_per_s: float

    def minimum_seconds(self, num_bytes: float, num_flops: float) -> float:
        """The roofline: the slower of reading everything once and computing everything once."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def attention_step_cost(
    config: AttentionConfig, seq_lens: Lengths, extend_seq_lens: Lengths
) -> AttentionCost:
    """Cost of one step over all layers of this rank.

    seq_lens (bs,): keys of each row, the new tokens' included. extend_seq_lens (bs,): new tokens.
    A row's K and V count once however many queries share them: what a perfect kernel would read.
    """
    total = seq_lens.astype(np.int64)
    new = extend_seq_lens.astype(np.int64)
    key_bytes = config.tp_k_head_num * (config.head_dim + config.v_head_dim)
    key_bytes *= config.kv_dtype.itemsize
    pair_flops = 2 * config.tp_q_head_num * (config.head_dim + config.v_head_dim)
    bytes_read, flops = 0, 0
    windows = Counter(layer.sliding_window_size for layer in config.layers)
    for window, num_layers in windows.items():
        bytes_read += num_layers * key_bytes * _keys_read(total, new, window)
        flops += num_layers * pair_flops * _visible_pairs(total, new, window)
    return AttentionCost(bytes_read, flops)


def _keys_read(total: npt.NDArray[np.int64], new: npt.NDArray[np.int64], window: int) -> int:
    """Distinct keys that any new token sees, summed over rows that bring a new token."""
    seen = total if window < 0 else np.minimum(total, new + window - 1)
    return int(seen[new > 0].sum())


def _visible_pairs(total: npt.NDArray[np.int64], new: npt.NDArray[np.int64], window: int) -> int:
    """(query, key) pairs that causality and the window leave, summed over rows."""
    return int((_pairs_up_to(total, window) - _pairs_up_to(total - new, window)).sum())


def _pairs_up_to(length: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Visible pairs of the first `length` queries of a row: the sum of min(i, window), i >= 1."""
    growing = length if window < 0 else np.minimum(length, window)
    return growing * (growing + 1) // 2 + (length - growing) * growing
