"""Paged attention of one query a row in plain torch: batched, no loop over rows or heads.

Rows are sorted by length and cut into chunks, so that padding stays small and a chunk's keys stay
in the cache between the gather and the product. Keys are gathered by token, never by page: padding
repeats a token of the row itself, hence nothing that the row does not own is ever read, and the
result does not depend on the page size. Values are not gathered at all: embedding_bag sums the
rows of V with the probabilities as weights. Knows no batch mode and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from attention.forward_batch import AttentionLayer
from attention.kernels.torch_scores import capped_sink_softmax
from attention.memory.layout import EveryToken, Retention

MAX_CHUNK_KEY_BYTES = 4 << 20
MAX_CHUNK_PADDING_TOKENS = 1024
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SingleTokenRows:
    """One-token rows of a step, longest first.

    slots: int64 (n,), row of req_to_token. seq_lens: int64 (n,), at least 1, on the host.
    """

    slots: torch.Tensor
    seq_lens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Rows start .. stop of the sorted order, padded to the longest of them.

    key_indices: (rows * kv_heads * max_keys,) into K seen as (tokens * kv_heads, head_dim).
    value_indices: (rows * q_heads * max_keys,) into V seen alike; value_offsets: (rows * q_heads,),
    where each sum begins.
    bias: float32 (rows, 1, max_keys), 0 or -inf; None when no row is padded.
    """

    start: int
    stop: int
    max_keys: int
    key_indices: torch.Tensor
    value_indices: torch.Tensor
    value_offsets: torch.Tensor
    bias: torch.Tensor | None


def cut_into_chunks(
    num_keys: npt.NDArray[np.int64], max_chunk_tokens: int
) -> list[tuple[int, int]]:
    """Cut lengths into [start, stop) ranges; descending lengths make the fewest.

    A range holds at most max_chunk_tokens padded keys (one row may exceed it alone) and at most
    MAX_CHUNK_PADDING_TOKENS of them are padding: about what starting another range costs.
    """
    ranges: list[tuple[int, int]] = []
    start, longest, held = 0, 0, 0
    for row, length in enumerate(num_keys.tolist()):
        padded = (row + 1 - start) * max(longest, length)
        is_full = padded > max_chunk_tokens
        if row > start and (is_full or padded - held - length > MAX_CHUNK_PADDING_TOKENS):
            ranges.append((start, row))
            start, longest, held = row, 0, 0
        longest, held = max(longest, length), held + length
    if len(num_keys):
        ranges.append((start, len(num_keys)))
    return ranges


class DecodePlanner:
    """Turns row lengths and the request table into chunks, once per step and kind of layer.

    max_chunk_tokens: keys that a chunk gathers at a time; a row may exceed it alone.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        num_cache_slots: int,
        q_heads: int,
        kv_heads: int,
        max_chunk_tokens: int,
    ) -> None:
        self._max_chunk_tokens = max_chunk_tokens
        # Flat; the table may be some columns of another one.
        num_rows, self._row_stride = req_to_token.shape[0], req_to_token.stride(0)
        num_places = (num_rows - 1) * self._row_stride + req_to_token.shape[1]
        self._req_to_token = req_to_token.as_strided((num_places,), (1,))
        self._q_heads = q_heads
        self._kv_heads = kv_heads
        fits_int32 = num_cache_slots * kv_heads <= _INT32_MAX
        self._index_dtype = torch.int32 if fits_int32 else torch.int64
        self._kv_head_ids = torch.arange(
            kv_heads, dtype=self._index_dtype, device=req_to_token.device
        ).view(1, kv_heads, 1)

    def plan(self, rows: SingleTokenRows, retention: Retention) -> list[DecodeChunk]:
        """Chunks for layers whose queries see what the retention says."""
        num_keys = rows.seq_lens
        if not isinstance(retention, EveryToken):
            num_keys = num_keys - retention.first_visible(num_keys - 1)
        return [
            self._plan_chunk(rows, num_keys, start, stop)
            for start, stop in cut_into_chunks(num_keys, self._max_chunk_tokens)
        ]

    def _plan_chunk(
        self, rows: SingleTokenRows, num_keys: npt.NDArray[np.int64], start: int, stop: int
    ) -> DecodeChunk:
        max_keys = int(num_keys[start:stop].max())
        device = self._req_to_token.device
        lengths = np.stack((rows.seq_lens[start:stop], num_keys[start:stop]))[..., None]
        seq_lens, counts = torch.from_numpy(lengths).to(device)
        columns = torch.arange(max_keys, device=device).view(1, -1)
        positions = torch.minimum(seq_lens - counts + columns, seq_lens - 1)
        flat = rows.slots[start:stop].view(-1, 1) * self._row_stride + positions
        tokens = self._req_to_token.index_select(0, flat.view(-1)).to(self._index_dtype)
        keys = tokens.view(-1, 1, max_keys) * self._kv_heads + self._kv_head_ids
        group = self._q_heads // self._kv_heads
        values = keys.unsqueeze(2).expand(-1, -1, group, -1).reshape(-1)
        offsets = torch.arange(0, values.shape[0], max_keys, dtype=self._index_dtype, device=device)
        bias = None
        if int(num_keys[start:stop].min()) != max_keys:
            bias = torch.zeros((stop - start, 1, max_keys), dtype=torch.float32, device=device)
            bias.masked_fill_((columns >= counts).unsqueeze(1), -torch.inf)
        return DecodeChunk(start, stop, max_keys, keys.view(-1), values, offsets, bias)


class DecodeKernel:
    """Runs planned chunks for one layer. Keeps the scratch memory that the chunks share."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        chunks: list[DecodeChunk],
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """q float32 (n, q_heads, head_dim), in planned order -> float32 (n, q_heads, v_head_dim).

        k_cache, v_cache: (num_pages, page_size, kv_heads, head_dim | v_head_dim).
        """
        keys = k_cache.view(-1, k_cache.shape[-1])
        values = v_cache.view(-1, v_cache.shape[-1])
        out = q.new_empty((q.shape[0], q.shape[1], values.shape[-1]))
        for chunk in chunks:
            scores = self._scores(q[chunk.start : chunk.stop], keys, chunk, layer)
            sinks = None if layer.sinks is None else layer.sinks.float().view(-1, 1)
            weights = capped_sink_softmax(scores, chunk.bias, layer.logit_cap, sinks)
            summed = functional.embedding_bag(
                chunk.value_indices,
                values,
                chunk.value_offsets,
                mode="sum",
                per_sample_weights=weights.view(-1).to(values.dtype),
            )
            out[chunk.start : chunk.stop] = summed.view(-1, *out.shape[1:])
        return out

    def _scores(
        self, q: torch.Tensor, keys: torch.Tensor, chunk: DecodeChunk, layer: AttentionLayer
    ) -> torch.Tensor:
        """Scaled scores float32 (rows, q_heads, max_keys)."""
        num_rows, q_heads, head_dim = q.shape
        kv_heads = layer.tp_k_head_num
        gathered = self._take("keys", (chunk.key_indices.shape[0], head_dim), keys)
        torch.index_select(keys, 0, chunk.key_indices, out=gathered)
        if gathered.dtype != torch.float32:
            gathered = self._take("keys", tuple(gathered.shape), q).copy_(gathered)
        batch = num_rows * kv_heads
        scores = self._take("scores", (batch, q_heads // kv_heads, chunk.max_keys), q)
        torch.baddbmm(
            scores,
            q.reshape(batch, -1, head_dim),
            gathered.view(batch, chunk.max_keys, head_dim).transpose(1, 2),
            beta=0.0,
            alpha=layer.scaling,
            out=scores,
        )
        return scores.view(num_rows, q_heads, chunk.max_keys)

    def _take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Scratch of this shape; contents are whatever the last user left."""
        num_elements = int(np.prod(shape))
        buffer = self._scratch.get((name, like.dtype))
        if buffer is None or buffer.numel() < num_elements:
            with torch.inference_mode(False):
                buffer = torch.empty(num_elements, dtype=like.dtype, device=like.device)
            self._scratch[name, like.dtype] = buffer
        return buffer[:num_elements].view(shape)
