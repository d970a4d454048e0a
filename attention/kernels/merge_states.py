"""Attention over a part of the keys, and how two parts become one.

A state is an attention output with the log-sum-exp of its scores; that is all a softmax over more
keys needs of it. The formula is that by which FlashAttention joins its splits of the keys (Flash-
Decoding, Dao et al., 2023; section 3.1 of FlashAttention, arXiv:2205.14135). Knows no pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """out: float32 (..., v_head_dim), softmax(scores) @ V over some keys. lse: float32 (...), the
    log-sum-exp of those scores; -inf where there were no keys, then out is any finite value."""

    out: torch.Tensor
    lse: torch.Tensor


def merge_states(one: AttentionState, other: AttentionState) -> AttentionState:
    """The state over the keys of both, which share none.

    out = (e^lse1 out1 + e^lse2 out2) / (e^lse1 + e^lse2), with the larger exponent taken out. Where
    neither has keys: out 0, lse -inf.
    """
    peak = torch.maximum(one.lse, other.lse)
    finite_peak = peak.masked_fill(peak.isneginf(), 0.0)
    one_share = torch.exp(one.lse - finite_peak)
    other_share = torch.exp(other.lse - finite_peak)
    total = one_share + other_share
    divisor = total.masked_fill(total == 0.0, 1.0)
    out = one.out * (one_share / divisor).unsqueeze(-1)
    out.addcmul_(other.out, (other_share / divisor).unsqueeze(-1))
    return AttentionState(out, torch.log(total) + finite_peak)
