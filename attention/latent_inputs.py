"""What a layer of multi-head latent attention hands to a backend. Imports no backend.

DeepSeek-V2 (arXiv:2405.04434), section 2.1: K and V of all heads follow from one latent of a token
by two matrices a head, except for a rotated part of the key that all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attention.memory.layout import LatentEntry


@dataclass(frozen=True, slots=True)
class LatentTokens:
    """The step's new tokens, n of them, on one rank.

    q_nope: (n, tp_q_head_num, nope_dim); q_rope: (n, tp_q_head_num, rope_dim), rotated.
    latent: (n, latent_dim), normalised; k_rope: (n, rope_dim), rotated. Strides are free.
    is_saved: whether the pool holds the latents already.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor
    is_saved: bool = False

    @property
    def q(self) -> torch.Tensor:
        """(n, tp_q_head_num, nope_dim + rope_dim): without a copy where the two parts are parts of
        such a tensor."""
        nope, rope = self.q_nope, self.q_rope
        nope_bytes = nope.shape[-1] * nope.itemsize
        is_joined = nope.data_ptr() + nope_bytes == rope.data_ptr()
        if is_joined and nope.stride() == rope.stride() and nope.stride(-1) == 1:
            size = (*nope.shape[:-1], nope.shape[-1] + rope.shape[-1])
            return nope.as_strided(size, nope.stride())
        return torch.cat((nope, rope), dim=-1)

    def split(self, first: int) -> tuple[LatentTokens, LatentTokens]:
        """The tokens before first and those from it on, as views."""
        return self._part(slice(first)), self._part(slice(first, None))

    def _part(self, own: slice) -> LatentTokens:
        parts = self.q_nope[own], self.q_rope[own], self.latent[own], self.k_rope[own]
        return LatentTokens(*parts, is_saved=self.is_saved)


@dataclass(frozen=True, slots=True)
class UpProjections:
    """From a latent to this rank's heads: K = latent @ w_uk^T, V = latent @ w_uv^T, head by head.

    w_uk: (tp_q_head_num, nope_dim, latent_dim); w_uv: (tp_q_head_num, v_head_dim, latent_dim). The
    last dimension is contiguous, the others have any strides.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor


class LatentLayer(Protocol):
    """What a backend reads of the layer that calls it; LatentAttention is the one there is.

    scaling: of q_nope . k_nope + q_rope . k_rope, whichever way a backend computes it.
    """

    tp_q_head_num: int
    v_head_dim: int
    entry: LatentEntry
    scaling: float
    layer_id: int
