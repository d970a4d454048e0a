"""Random steps of multi-head latent attention, and the same step over the heads they stand for.

A row's contents depend on its content_seed and on nothing else, as in cases.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from attention import (
    AttentionConfig,
    ForwardBatch,
    LatentAttention,
    LatentEntry,
    LatentTokens,
    LayerAttentionConfig,
    UpProjections,
)
from attention.backends.base import AttentionBackend
from attention.backends.torch_native_latent import TorchNativeLatentBackend
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.oracle import attend_one_head, attend_seen
from attention.oracle_visibility import OracleRow, rows_of_batch, seen_keys
from attention.visibility import Causal
from tests.unit.attention.cases import CaseSpec, RowSpec, build_batch

HEADS = 4
NOPE_DIM = 24
V_HEAD_DIM = 32
ENTRY = LatentEntry(latent_dim=40, rope_dim=16)
SCALING = 0.17


@dataclass(frozen=True, slots=True)
class LatentDims:
    """num_heads of nope_dim + entry.rope_dim and v_head_dim elements."""

    num_heads: int = HEADS
    nope_dim: int = NOPE_DIM
    v_head_dim: int = V_HEAD_DIM
    entry: LatentEntry = ENTRY
    scaling: float = SCALING


SMALL = LatentDims()
DEEPSEEK = LatentDims(16, 128, 128, LatentEntry(512, 64), 192**-0.5)


@dataclass(frozen=True, slots=True)
class RowContent:
    """Of every token of a row, the cached ones included."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor

    def since(self, first: int) -> RowContent:
        parts = (self.q_nope, self.q_rope, self.latent, self.k_rope)
        return RowContent(*(part[first:] for part in parts))


@dataclass(frozen=True, slots=True)
class LatentCase:
    """A built step: the pool holds the prefixes, everything else in it is NaN."""

    spec: CaseSpec
    config: AttentionConfig
    table: ReqToTokenPool
    pool: LatentTokenToKVPool
    layer: LatentAttention
    batch: ForwardBatch
    up: UpProjections
    contents: tuple[RowContent, ...]
    dims: LatentDims = SMALL

    def backend(self) -> AttentionBackend:
        return TorchNativeLatentBackend(self.config, self.table, self.pool)

    def tokens(self) -> LatentTokens:
        news = [
            content.since(row.prefix_len)
            for row, content in zip(self.spec.rows, self.contents, strict=True)
        ]
        return LatentTokens(
            q_nope=torch.cat([new.q_nope for new in news]),
            q_rope=torch.cat([new.q_rope for new in news]),
            latent=torch.cat([new.latent for new in news]),
            k_rope=torch.cat([new.k_rope for new in news]),
        )

    def run(self, backend: AttentionBackend | None = None) -> torch.Tensor:
        """(num_tokens, heads, v_head_dim), by way of the layer."""
        backend = backend or self.backend()
        batch = replace(self.batch, attn_backend=backend)
        backend.init_forward_metadata(batch)
        with torch.inference_mode():
            out = self.layer(self.tokens(), self.up, batch)
        return out.view(-1, self.dims.num_heads, self.dims.v_head_dim)

    def run_oracle(self) -> torch.Tensor:
        """In float64, over K and V of every head, row by row; knows no pool."""
        rows = zip(self.spec.rows, self.contents, rows_of_batch(self.batch), strict=True)
        return torch.cat([self._expanded_row(*row) for row in rows])

    def _expanded_row(self, row: RowSpec, content: RowContent, seen: OracleRow) -> torch.Tensor:
        kept = content.latent.to(self.spec.kv_dtype).double()
        rope = content.k_rope.to(self.spec.kv_dtype).double()
        visibility = self.batch.visibility
        is_causal = isinstance(visibility, Causal)
        keys = None if is_causal else seen_keys(visibility, seen, LayerAttentionConfig())
        heads = []
        for head in range(self.dims.num_heads):
            q = torch.cat((content.q_nope[:, head], content.q_rope[:, head]), dim=-1)
            k = torch.cat((kept @ self.up.w_uk[head].double().t(), rope), dim=-1)
            v = kept @ self.up.w_uv[head].double().t()
            new = q[row.prefix_len :]
            if keys is None:
                heads.append(attend_one_head(new, k, v, self.dims.scaling))
            else:
                heads.append(attend_seen(new, k, v, self.dims.scaling, keys))
        return torch.stack(heads, dim=1)

    def by_row(self, out: torch.Tensor) -> list[torch.Tensor]:
        return list(out.split([row.num_new for row in self.spec.rows]))


def latent_config(spec: CaseSpec, dims: LatentDims = SMALL) -> AttentionConfig:
    """Of spec, whose heads and head sizes are not used."""
    longest = max(row.seq_len for row in spec.rows)
    return AttentionConfig(
        num_layers=1,
        tp_q_head_num=dims.num_heads,
        tp_k_head_num=dims.num_heads,
        head_dim=dims.nope_dim + dims.entry.rope_dim,
        v_head_dim=dims.v_head_dim,
        max_context_len=longest + 7,
        page_size=spec.page_size,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        device=spec.device,
        layers=(LayerAttentionConfig(),),
        latent=dims.entry,
    )


def build_latent_case(spec: CaseSpec, dims: LatentDims = SMALL) -> LatentCase:
    config = latent_config(spec, dims)
    num_slots = len(spec.rows) + 2
    table = ReqToTokenPool(num_slots, config.max_context_len, spec.device)
    pages_per_row = [-(-row.seq_len // spec.page_size) for row in spec.rows]
    pool = LatentTokenToKVPool(config, num_pages=sum(pages_per_row) + 4)
    pool.get_latent(0).fill_(torch.nan)
    table.req_to_token.fill_(pool.num_pages * pool.page_size - 1)
    layout = np.random.default_rng(spec.layout_seed)
    pages = layout.permutation(np.arange(1, pool.num_pages))
    slots = layout.permutation(num_slots)[: len(spec.rows)]
    contents = tuple(_row_content(spec, row, dims) for row in spec.rows)
    new_locations = []
    first_page = 0
    for row, num_pages, slot, content in zip(
        spec.rows, pages_per_row, slots.tolist(), contents, strict=True
    ):
        own = pages[first_page : first_page + num_pages]
        first_page += num_pages
        places = (own[:, None] * spec.page_size + np.arange(spec.page_size)).reshape(-1)
        tokens = torch.from_numpy(places[: row.seq_len]).to(spec.device)
        table.write(torch.tensor([slot], device=spec.device), 0, tokens.to(torch.int32))
        cached = slice(0, row.prefix_len)
        pool.set_latent(0, tokens[cached], content.latent[cached], content.k_rope[cached])
        new_locations.append(tokens[row.prefix_len :])
    layer = LatentAttention(dims.num_heads, dims.v_head_dim, dims.entry, dims.scaling, layer_id=0)
    backend = TorchNativeLatentBackend(config, table, pool)
    batch = build_batch(spec, slots, new_locations, backend)
    up = _up_projections(spec, dims)
    return LatentCase(spec, config, table, pool, layer, batch, up, contents, dims)


def _up_projections(spec: CaseSpec, dims: LatentDims) -> UpProjections:
    """Two views of one matrix, as a checkpoint has them."""
    generator = torch.Generator().manual_seed(77)
    latent_dim = dims.entry.latent_dim
    shape = (dims.num_heads, dims.nope_dim + dims.v_head_dim, latent_dim)
    joined = torch.randn(shape, generator=generator).mul_(latent_dim**-0.5)
    joined = joined.to(spec.device, spec.dtype)
    return UpProjections(joined[:, : dims.nope_dim], joined[:, dims.nope_dim :])


def _row_content(spec: CaseSpec, row: RowSpec, dims: LatentDims) -> RowContent:
    generator = torch.Generator().manual_seed(row.content_seed)
    heads, entry = dims.num_heads, dims.entry
    shapes = (
        (heads, dims.nope_dim),
        (heads, entry.rope_dim),
        (entry.latent_dim,),
        (entry.rope_dim,),
    )
    drawn = (torch.randn((row.seq_len, *shape), generator=generator) for shape in shapes)
    return RowContent(*(part.to(spec.device, spec.dtype) for part in drawn))
