"""What a step's attention must at least read and compute, and how close a measured time comes.

Pure arithmetic on host copies of lengths. Counts the attention proper: K and V read once per row
and layer, and the two products of the visible scores; no projections, no writes, no softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention.config import AttentionConfig
from attention.memory.layout import (
    CurrentChunk,
    EveryToken,
    FixedLength,
    LastTokens,
    LatentEntry,
    Retention,
)

Lengths = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

NO_LENGTHS: Lengths = np.zeros(0, dtype=np.int32)


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
    config: AttentionConfig,
    seq_lens: Lengths,
    extend_seq_lens: Lengths,
    encoder_lens: Lengths = NO_LENGTHS,
) -> AttentionCost:
    """Cost of one step over all layers of this rank.

    seq_lens (bs,): keys of each row, the new tokens' included. extend_seq_lens (bs,): new tokens.
    encoder_lens (bs,): tokens of each row's encoder, where the model has one; what the encoder
    itself computes does not count.
    A row's K and V count once however many queries share them: what a perfect kernel would read.
    """
    if config.latent is not None:
        return _latent_step_cost(config, config.latent, seq_lens, extend_seq_lens)
    total = seq_lens.astype(np.int64)
    new = extend_seq_lens.astype(np.int64)
    bytes_read, flops = 0, 0
    for (retention, _, _), (key_bytes, pair_flops) in config.cost_by_kind.items():
        if isinstance(retention, FixedLength):
            seen = encoder_lens.astype(np.int64)
            num_keys, num_pairs = int(seen[new > 0].sum()), int((seen * new).sum())
        else:
            num_keys = _keys_read(total, new, retention)
            num_pairs = _visible_pairs(total, new, retention)
        bytes_read += key_bytes * num_keys
        flops += pair_flops * num_pairs
    return AttentionCost(bytes_read, flops)


def _latent_step_cost(
    config: AttentionConfig, latent: LatentEntry, seq_lens: Lengths, extend_seq_lens: Lengths
) -> AttentionCost:
    """Latents are read once a row. One new token attends to them as they lie, several to the heads
    that follow from them; up-projections do not count, as no projection does."""
    total = seq_lens.astype(np.int64)
    new = extend_seq_lens.astype(np.int64)
    single = np.where(new == 1, new, 0)
    absorbed_pairs = _visible_pairs(total, single, EveryToken())
    head_pairs = _visible_pairs(total, new - single, EveryToken())
    absorbed_dim = latent.elements_per_token + latent.latent_dim
    flops = absorbed_pairs * absorbed_dim + head_pairs * (config.head_dim + config.v_head_dim)
    flops *= 2 * config.tp_q_head_num * config.num_layers
    return AttentionCost(config.kv_bytes_per_token * _keys_read(total, new, EveryToken()), flops)


def _keys_read(total: Counts, new: Counts, retention: Retention) -> int:
    """Distinct keys that any new token sees, summed over rows that bring a new token."""
    is_whole = isinstance(retention, EveryToken)
    seen = total if is_whole else total - retention.first_visible(total - new)
    return int(seen[new > 0].sum())


def _visible_pairs(total: Counts, new: Counts, retention: Retention) -> int:
    """(query, key) pairs that causality and the retention leave, summed over rows."""
    return int((_pairs_up_to(total, retention) - _pairs_up_to(total - new, retention)).sum())


def _pairs_up_to(length: Counts, retention: Retention) -> Counts:
    """Visible pairs of the first `length` queries of a row."""
    match retention:
        case EveryToken():
            return _triangle(length)
        case LastTokens(num_tokens):
            growing = np.minimum(length, num_tokens)
            return _triangle(growing) + (length - growing) * growing
        case CurrentChunk(num_tokens):
            chunk_pairs = num_tokens * (num_tokens + 1) // 2
            return length // num_tokens * chunk_pairs + _triangle(length % num_tokens)


def _triangle(length: Counts) -> Counts:
    return length * (length + 1) // 2
