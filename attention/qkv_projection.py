"""A layer's QKV projection before rotation, as attention kernels that finish it themselves take it.

Data only: launches nothing and knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm over every query and key head. Weights: (head_dim,), of the model's dtype, to scale
    what was rounded to it (Qwen3), or float32, to scale what was not (Gemma 3)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """What turns one layer's projection into q, k and v; never changes after loading.

    cos_sin: float32 (positions, head_dim), cosines first; a whole head rotates, in halves (NeoX).
    bias: ((q_heads + 2 * kv_heads) * head_dim,) or None.
    """

    cos_sin: torch.Tensor
    bias: torch.Tensor | None
    head_norm: HeadNorm | None


@dataclass(frozen=True, slots=True)
class QKVProjection:
    """partials (splits, num_tokens, (q_heads + 2 * kv_heads) * head_dim), contiguous.

    Their sum over splits is the projection, which then has bias, head norm and rotation still to
    come. dtype: the model's, to which the projection is rounded.
    """

    partials: torch.Tensor
    rotation: Rotation
    dtype: torch.dtype
