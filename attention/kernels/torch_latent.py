"""Multi-head latent attention in plain torch, in its two forms.

Absorbed: W_UK goes into the query, so that all heads attend to the latents as they lie, and what
comes out goes through W_UV (DeepSeek-V2, section 2.1.2). Multi-head, for many queries of one row: a
piece of the latents becomes K and V of every head, which costs less a pair of query and key. Scores
are float32. Knows no pool and no batch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from attention.kernels.merge_states import AttentionState
from attention.kernels.torch_decode import DecodeChunk
from attention.latent_inputs import LatentLayer, UpProjections
from attention.memory.layout import LatentEntry


def absorb_queries(q_nope: torch.Tensor, q_rope: torch.Tensor, up: UpProjections) -> torch.Tensor:
    """q_nope (n, heads, nope_dim), q_rope (n, heads, rope_dim) -> queries of what the pool holds,
    float32 (n, heads, latent_dim + rope_dim)."""
    absorbed = torch.bmm(q_nope.transpose(0, 1), up.w_uk).transpose(0, 1)
    return torch.cat((absorbed, q_rope), dim=-1).float()


def attend_absorbed(
    q: torch.Tensor, latents: torch.Tensor, chunks: list[DecodeChunk], layer: LatentLayer
) -> torch.Tensor:
    """Planned rows of one query each: q of absorb_queries -> float32 (n, heads, latent_dim).

    latents: (tokens, latent_dim + rope_dim), the layer's pool. chunks: planned for one KV head.
    """
    latent_dim = layer.entry.latent_dim
    out = q.new_empty((*q.shape[:2], latent_dim))
    for chunk in chunks:
        rows = slice(chunk.start, chunk.stop)
        keys = latents.index_select(0, chunk.key_indices).float()
        keys = keys.view(chunk.stop - chunk.start, chunk.max_keys, -1)
        scores = torch.bmm(q[rows], keys.transpose(1, 2)).mul_(layer.scaling)
        if chunk.bias is not None:
            scores.add_(chunk.bias)
        out[rows] = torch.bmm(torch.softmax(scores, dim=-1), keys[..., :latent_dim])
    return out


def project_values(attended: torch.Tensor, up: UpProjections, dtype: torch.dtype) -> torch.Tensor:
    """What attend_absorbed gives (n, heads, latent_dim) -> (n, heads, v_head_dim) in dtype."""
    by_head = attended.to(dtype).transpose(0, 1)
    return torch.bmm(by_head, up.w_uv.transpose(1, 2)).transpose(0, 1)


def absorbing_pays(num_queries: int, up: UpProjections, entry: LatentEntry) -> bool:
    """Whether num_queries of one row take fewer multiply-adds a key and head by attending to the
    latent than by making K and V of it and attending to these."""
    nope_dim, v_head_dim = up.w_uk.shape[1], up.w_uv.shape[1]
    over_latent = num_queries * (entry.elements_per_token + entry.latent_dim)
    over_heads = num_queries * (nope_dim + entry.rope_dim + v_head_dim)
    return over_latent <= over_heads + entry.latent_dim * (nope_dim + v_head_dim)


class RowKeys(Protocol):
    """A bounded piece of one row's tokens, as keys and values of every head."""

    def attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, hidden: torch.Tensor | None
    ) -> AttentionState:
        """q_nope (n, heads, nope_dim), q_rope (n, heads, rope_dim) -> out (n, heads, v_head_dim).

        hidden: bool (n, m), which keys a query does not see, all of them it may be. None: all are
        seen.
        """
        ...


class AbsorbedKeys(RowKeys):
    """m tokens of a row as they lie: latents (m, latent_dim + rope_dim), in float32."""

    def __init__(
        self, latents: torch.Tensor, up: UpProjections, layer: LatentLayer, dtype: torch.dtype
    ) -> None:
        self._keys = latents.float()
        self._values = self._keys[:, : layer.entry.latent_dim]
        self._up, self._scaling, self._dtype = up, layer.scaling, dtype

    def attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, hidden: torch.Tensor | None
    ) -> AttentionState:
        q = absorb_queries(q_nope, q_rope, self._up)
        scores = (q.flatten(0, 1) @ self._keys.t()).mul_(self._scaling).view(*q.shape[:2], -1)
        if hidden is not None:
            scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, lse)
        attended = (weights.flatten(0, 1) @ self._values).view(*q.shape[:2], -1)
        return AttentionState(project_values(attended, self._up, self._dtype).float(), lse)


class ExpandedKeys(RowKeys):
    """K and V of every head for m tokens of a row: the bounded piece that is up-projected at once.

    latents: (m, latent_dim + rope_dim), computed in dtype, kept in float32.
    """

    def __init__(
        self, latents: torch.Tensor, up: UpProjections, layer: LatentLayer, dtype: torch.dtype
    ) -> None:
        latents = latents.to(dtype)
        latent, k_rope = latents.tensor_split((layer.entry.latent_dim,), dim=-1)
        by_head = latent.expand(layer.tp_q_head_num, -1, -1)
        self._k_nope = torch.bmm(by_head, up.w_uk.transpose(1, 2)).float()
        self._values = torch.bmm(by_head, up.w_uv.transpose(1, 2)).float()
        self._k_rope = k_rope.float()
        self._scaling = layer.scaling

    def attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, hidden: torch.Tensor | None
    ) -> AttentionState:
        num_queries, num_heads = q_nope.shape[:2]
        q_rope = q_rope.transpose(0, 1).reshape(-1, q_rope.shape[-1]).float()
        scores = (q_rope @ self._k_rope.t()).view(num_heads, num_queries, -1)
        scores.baddbmm_(
            q_nope.transpose(0, 1).float(),
            self._k_nope.transpose(1, 2),
            beta=self._scaling,
            alpha=self._scaling,
        )
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, lse)
        out = torch.bmm(weights, self._values)
        return AttentionState(out.transpose(0, 1), lse.t())


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), in scores' memory; zeros where no key is seen."""
    return scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
