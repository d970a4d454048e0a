"""Random attention steps, built from a short description, for every backend and device.

A row's q, k and v depend on its content_seed and on nothing else, so that the same row can be put
into another batch, cut into other chunks or spread over other pages and still be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attention import AttentionConfig, ForwardBatch, ForwardMode, LayerAttentionConfig
from attention.backends.base import AttentionBackend
from attention.layer import RadixAttention
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.oracle import OracleBackend

PAGE_SIZES = (1, 16, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A row of prefix_len cached tokens and num_new new ones."""

    prefix_len: int
    num_new: int
    content_seed: int

    @property
    def seq_len(self) -> int:
        return self.prefix_len + self.num_new


def rows_of(*lengths: tuple[int, int]) -> tuple[RowSpec, ...]:
    """(prefix_len, num_new) pairs to rows with contents of their own."""
    return tuple(RowSpec(prefix, new, seed) for seed, (prefix, new) in enumerate(lengths))


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """A step. layout_seed decides which pages the rows get; stale memory is NaN everywhere."""

    rows: tuple[RowSpec, ...]
    page_size: int = 16
    q_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    v_head_dim: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    layer: LayerAttentionConfig = field(default_factory=LayerAttentionConfig)
    layout_seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def mode(self) -> ForwardMode:
        if not self.rows:
            return ForwardMode.IDLE
        is_decode = all(row.num_new == 1 for row in self.rows)
        return ForwardMode.DECODE if is_decode else ForwardMode.EXTEND

    def with_rows(self, *rows: RowSpec) -> CaseSpec:
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A built step: what a backend's constructor and its forward take."""

    spec: CaseSpec
    config: AttentionConfig
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    layer: RadixAttention
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, backend_class: type[AttentionBackend]) -> torch.Tensor:
        """(num_tokens, q_heads, v_head_dim), by way of the layer."""
        backend = backend_class(self.config, self.req_to_token_pool, self.token_to_kv_pool)
        batch = replace(self.batch, attn_backend=backend)
        backend.init_forward_metadata(batch)
        with torch.inference_mode():
            out = self.layer(self.q.flatten(1), self.k.flatten(1), self.v.flatten(1), batch)
        return out.view(-1 if len(self.q) else 0, self.spec.q_heads, self.spec.v_head_dim)

    def run_oracle(self) -> torch.Tensor:
        return self.run(OracleBackend)

    def by_row(self, out: torch.Tensor) -> list[torch.Tensor]:
        return list(out.split([row.num_new for row in self.spec.rows]))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 for two empty tensors, NaN if any element is."""
    if expected.numel() == 0 and actual.shape == expected.shape:
        return 0.0
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def build_case(spec: CaseSpec) -> AttentionCase:
    """Everything a backend needs for one step of one layer, on spec.device."""
    config = _config(spec)
    num_slots = len(spec.rows) + 2
    table = ReqToTokenPool(num_slots, config.max_context_len, spec.device)
    pages_per_row = [-(-row.seq_len // spec.page_size) for row in spec.rows]
    kv_pool = MHATokenToKVPool(config, num_pages=sum(pages_per_row) + 4)
    _poison(kv_pool, table)
    layout = np.random.default_rng(spec.layout_seed)
    pages = layout.permutation(np.arange(1, kv_pool.num_pages))
    slots = layout.permutation(num_slots)[: len(spec.rows)]
    contents = [_row_content(spec, row) for row in spec.rows]
    new_locations = []
    first_page = 0
    for row, num_pages, slot, (_, k, v) in zip(
        spec.rows, pages_per_row, slots.tolist(), contents, strict=True
    ):
        own = pages[first_page : first_page + num_pages]
        first_page += num_pages
        locations = (own[:, None] * spec.page_size + np.arange(spec.page_size)).reshape(-1)
        tokens = torch.from_numpy(locations[: row.seq_len]).to(spec.device)
        table.write(torch.tensor([slot], device=spec.device), 0, tokens.to(torch.int32))
        cached, new = tokens[: row.prefix_len], tokens[row.prefix_len :]
        kv_pool.set_kv_buffer(0, cached, k[: row.prefix_len], v[: row.prefix_len])
        new_locations.append(new)
    q, k, v = (_new_tokens(spec, [content[i] for content in contents], i) for i in range(3))
    layer = _layer(spec)
    batch = build_batch(spec, slots, new_locations, OracleBackend(config, table, kv_pool))
    return AttentionCase(spec, config, table, kv_pool, layer, batch, q, k, v)


def _config(spec: CaseSpec) -> AttentionConfig:
    longest = max((row.seq_len for row in spec.rows), default=1)
    return AttentionConfig(
        num_layers=1,
        tp_q_head_num=spec.q_heads,
        tp_k_head_num=spec.kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        max_context_len=longest + 7,
        page_size=spec.page_size,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        device=spec.device,
        layers=(spec.layer,),
    )


def _layer(spec: CaseSpec) -> RadixAttention:
    layer = RadixAttention(
        spec.q_heads,
        spec.head_dim,
        spec.head_dim**-0.5,
        spec.kv_heads,
        layer_id=0,
        v_head_dim=spec.v_head_dim,
        logit_cap=spec.layer.logit_cap,
        sliding_window_size=spec.layer.sliding_window_size,
    )
    layer.chunk_size = spec.layer.chunk_size
    if spec.layer.has_sinks:
        generator = torch.Generator().manual_seed(99)
        layer.sinks = torch.randn(spec.q_heads, generator=generator).to(spec.device, spec.dtype)
    return layer


def _poison(kv_pool: MHATokenToKVPool, table: ReqToTokenPool) -> None:
    """NaN wherever nobody wrote; stale table entries point into it."""
    for buffer in kv_pool.get_kv_buffer(0):
        buffer.fill_(torch.nan)
    table.req_to_token.fill_(kv_pool.num_pages * kv_pool.page_size - 1)


def _row_content(spec: CaseSpec, row: RowSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of every token of the row, the cached ones included."""
    generator = torch.Generator().manual_seed(row.content_seed)
    shapes = (
        (spec.q_heads, spec.head_dim),
        (spec.kv_heads, spec.head_dim),
        (spec.kv_heads, spec.v_head_dim),
    )
    drawn = [torch.randn((row.seq_len, *shape), generator=generator) for shape in shapes]
    q, k, v = (tensor.to(spec.device, spec.dtype) for tensor in drawn)
    return q, k, v


def _new_tokens(spec: CaseSpec, contents: list[torch.Tensor], which: int) -> torch.Tensor:
    news = [c[row.prefix_len :] for c, row in zip(contents, spec.rows, strict=True)]
    if news:
        return torch.cat(news)
    heads = (spec.q_heads, spec.kv_heads, spec.kv_heads)[which]
    dim = (spec.head_dim, spec.head_dim, spec.v_head_dim)[which]
    return torch.empty((0, heads, dim), dtype=spec.dtype, device=spec.device)


def build_batch(
    spec: CaseSpec,
    slots: np.ndarray,
    new_locations: list[torch.Tensor],
    backend: AttentionBackend,
) -> ForwardBatch:
    device = spec.device
    prefix = np.array([row.prefix_len for row in spec.rows], dtype=np.int32)
    new = np.array([row.num_new for row in spec.rows], dtype=np.int32)
    positions = [np.arange(row.prefix_len, row.seq_len) for row in spec.rows]
    no_index = torch.empty(0, dtype=torch.int64, device=device)
    num_tokens = int(new.sum())
    return ForwardBatch(
        forward_mode=spec.mode,
        batch_size=len(spec.rows),
        num_tokens=num_tokens,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *positions])).to(device),
        req_pool_indices=torch.from_numpy(slots.astype(np.int64)).to(device),
        seq_lens=torch.from_numpy(prefix + new).to(device),
        extend_seq_lens=torch.from_numpy(new).to(device),
        extend_prefix_lens=torch.from_numpy(prefix).to(device),
        out_cache_loc=torch.cat([no_index, *new_locations]),
        seq_lens_cpu=prefix + new,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefix,
        attn_backend=backend,
    )
