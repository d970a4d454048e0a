"""FlashAttention-3 and the Triton kernels around it, in plain torch, for machines without a GPU.

Written from flash_attn_with_kvcache's documentation: what each argument means, row by row. It also
checks what the real kernel would refuse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning
from attention.kernels.paged_decode import DecodePlan, ScoreRule
from attention.kernels.providers import FlashAttention3, TritonKernels
from attention.kernels.step_tables import StepTables
from attention.qkv_projection import QKVProjection
from tests.fakes.qkv_projection import finish


def fake_flash_attention_3(has_sinks: bool = True, takes_out: bool = True) -> FlashAttention3:
    return FlashAttention3(
        "fake", attend, plan, has_sinks, takes_out, attend_flat=attend_flat, takes_qv=True
    )


def fake_triton_kernels() -> TritonKernels:
    return TritonKernels(fill_step_tables, copy_kv, quantise_kv, quantise_queries, line_up)


def line_up(
    tokens: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    starts: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    tokens.index_copy_(1, targets, tokens.index_select(1, sources))


class FakePagedDecode:
    """paged_decode.PagedDecode by way of attend below. A plan is the lengths it was made from."""

    def __init__(
        self,
        geometry: DecodeGeometry,
        device: torch.device,
        tuning_of: Callable[[int], DecodeTuning],
    ) -> None:
        self.geometry = geometry
        self.tuning_of = tuning_of

    @property
    def can_fuse_projection(self) -> bool:
        return self.geometry.can_fuse_projection

    def plan(self, cache_seqlens: torch.Tensor, sliding_window_size: int) -> DecodePlan:
        tuning = self.tuning_of(len(cache_seqlens))
        return DecodePlan(cache_seqlens.clone(), 0, sliding_window_size, tuning)

    def attend(
        self,
        q: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        plan: DecodePlan,
        rule: ScoreRule,
    ) -> torch.Tensor:
        bs, kv_heads = len(q), self.geometry.kv_heads
        assert kv_pages[0].shape[1:3] == (self.geometry.page_size, kv_heads)
        assert q.shape[1:] == (kv_heads * self.geometry.group, self.geometry.head_dim)
        assert q.stride()[1:] == (self.geometry.head_dim, 1)
        return attend(
            q,
            *kv_pages,
            cache_seqlens=plan.tensor,
            page_table=page_table,
            cu_seqlens_q=torch.arange(bs + 1, dtype=torch.int32),
            max_seqlen_q=1,
            softmax_scale=rule.scaling,
            causal=True,
            window_size=(plan.window - 1 if plan.window > 0 else -1, 0),
            softcap=rule.logit_cap,
            num_splits=0,
            scheduler_metadata=None,
            sinks=rule.sinks,
        )

    def attend_projected(
        self,
        projection: QKVProjection,
        out_cache_loc: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        plan: DecodePlan,
        rule: ScoreRule,
    ) -> torch.Tensor:
        positions = (plan.tensor.long() - 1).clamp(min=0)
        q, k, v = finish(projection, positions, self.geometry.num_q_heads, self.geometry.kv_heads)
        for new, pages in ((k, kv_pages[0]), (v, kv_pages[1])):
            pages.view(-1, *new.shape[1:])[out_cache_loc] = new.to(projection.dtype)
        return self.attend(q.to(projection.dtype), kv_pages, page_table, plan, rule)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    scheduler_metadata: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
) -> torch.Tensor:
    """(total_q, heads, v_head_dim); bfloat16 if q is e4m3. out: filled in rows that cu_seqlens_q
    covers, and returned. qv: (total_q, heads, v_head_dim), queries of the values."""
    assert causal
    assert k_cache.dtype == q.dtype
    for lengths in (cache_seqlens, cu_seqlens_q, page_table):
        assert lengths.dtype == torch.int32
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16
    _check_layout(q, k_cache, v_cache, qv)
    page_size = k_cache.shape[1]
    is_fp8 = q.dtype == torch.float8_e4m3fn
    exact = torch.zeros((*q.shape[:2], v_cache.shape[3]), dtype=torch.float64)
    starts = cu_seqlens_q.tolist()
    for row, num_keys in enumerate(cache_seqlens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        queries = q[tokens].double()
        assert len(queries) <= max_seqlen_q
        if num_keys == 0 or len(queries) == 0:
            continue
        positions = torch.arange(num_keys)
        pages = page_table[row][positions // page_size].long()
        k = k_cache[pages, positions % page_size].double()
        v = v_cache[pages, positions % page_size].double()
        if k_descale is not None and v_descale is not None:
            k = k * k_descale[row][:, None]
            v = v * v_descale[row][:, None]
        scores = _products(queries, k)
        if qv is not None:
            scores += _products(qv[tokens].double(), v)
        scores = _capped(scores * softmax_scale, softcap)
        scores.masked_fill_(_is_hidden(len(queries), num_keys, window_size[0]), -torch.inf)
        weights = _weights(scores, sinks)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        exact[tokens] = torch.einsum("hqk,khd->qhd", weights, values)
    result = exact.to(torch.bfloat16 if is_fp8 else q.dtype)
    return result if out is None else _fill(out, result, slice(starts[0], starts[-1]))


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(heads, queries, keys); KV heads are shared by groups of heads."""
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys and the sink, without the latter's share."""
    if sinks is None:
        return torch.softmax(scores, dim=2)
    sink = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=2), dim=2)[:, :, :-1]


def _check_layout(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, qv: torch.Tensor | None
) -> None:
    assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache) if x.numel())
    if qv is not None:
        assert (qv.dtype, qv.stride(-1)) == (q.dtype, 1)
        assert qv.shape == (*q.shape[:2], v_cache.shape[3])


def attend_flat(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v (total_k, heads, dim). Rows without keys: NaN, with a log-sum-exp of inf."""
    assert all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, v))
    assert (cu_seqlens_q.dtype, cu_seqlens_k.dtype) == (torch.int32, torch.int32)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k))
    out = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], torch.inf)
    for row in range(len(cu_seqlens_q) - 1):
        queries = slice(*cu_seqlens_q[row : row + 2].tolist())
        keys = slice(*cu_seqlens_k[row : row + 2].tolist())
        scores = _products(q[queries].double(), k[keys].double()) * softmax_scale
        if causal:
            scores.masked_fill_(_is_hidden(*scores.shape[1:], -1), -torch.inf)
        if scores.shape[2]:
            weights = torch.softmax(scores, dim=2)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys].double())
            lse[queries] = torch.logsumexp(scores, dim=2).t().float()
    return out.to(q.dtype), lse.t().contiguous()


def _is_hidden(num_queries: int, num_keys: int, window_left: int) -> torch.Tensor:
    """bool (num_queries, num_keys): what causality or the window hides."""
    positions = torch.arange(num_keys)
    own = torch.arange(num_queries)[:, None] + num_keys - num_queries
    is_hidden = positions > own
    return is_hidden if window_left < 0 else is_hidden | (positions < own - window_left)


def _fill(out: torch.Tensor, result: torch.Tensor, tokens: slice) -> torch.Tensor:
    assert (out.shape, out.dtype) == (result.shape, result.dtype)
    out[tokens] = result[tokens]
    return out


def plan(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    **arguments: object,
) -> torch.Tensor:
    """A copy of the lengths, so that a test can see which step a plan was made from."""
    assert cache_seqlens.shape == (batch_size,)
    return cache_seqlens.clone()


def fill_step_tables(
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    tables: StepTables,
    page_size: int,
    max_seq_len: int,
    window: int,
) -> None:
    bs = len(slots)
    tables.cache_seqlens[:bs] = seq_lens
    tables.cu_seqlens_q[1 : bs + 1] = extend_seq_lens.cumsum(0)
    tables.cu_seqlens_k[1 : bs + 1] = seq_lens.cumsum(0)
    lengths = zip(slots.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, (slot, length, num_new) in enumerate(lengths):
        pages = req_to_token[slot, :length:page_size] // page_size
        if window:
            pages[: max(length - max(num_new, 1) - window + 1, 0) // page_size] = 0
        tables.page_table[row, : len(pages)] = pages


def copy_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_indices: torch.Tensor,
) -> None:
    k_pages.view(-1, *k.shape[1:])[cache_indices] = k
    v_pages.view(-1, *v.shape[1:])[cache_indices] = v


def quantise_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_indices: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    for new, pages, scale in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        scaled = (new.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        tokens = pages.view(torch.uint8).view(-1, *new.shape[1:])
        tokens[cache_indices] = scaled.view(torch.uint8)


def quantise_queries(q: torch.Tensor) -> torch.Tensor:
    return q.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
