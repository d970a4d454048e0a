"""Triton: how a decode step's rows are cut into chunks, settled once a step on the device.

Lengths in, plan out. Knows no page and no layer. Imports Triton.

A plan is int32: the number of chunks, then of each chunk (max_items of them) its row, where its
keys start and stop, how many chunks its row has, which of the plan's chunks is its row's first, and
its row's number of keys; then a counter for each row and KV head, zero between layers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

PLAN_HEADER = tl.constexpr(8)
CHUNK_FIELDS = tl.constexpr(8)
_NUM_GROWTHS = tl.constexpr(8)
_GROWTHS_TO_DOUBLE = tl.constexpr(16)
_WHOLE = tl.constexpr(256)
_CHUNK_COST_KEYS = tl.constexpr(128)


def _cut_rows(
    seq_lens: tl.tensor,
    ideal: tl.tensor,
    slack: tl.tensor,
    window: tl.tensor,
    block_keys: tl.constexpr,
) -> tl.tensor:
    """Each row's first key, chunk size and number of chunks. Even a row without keys has one chunk.

    Chunks start at multiples of a block, so that a block lies in one page.
    """
    first_keys = tl.maximum(seq_lens - window, 0) // block_keys * block_keys
    lengths = seq_lens - first_keys
    wanted = tl.maximum(tl.cdiv(lengths - slack, ideal), 1)
    sizes = tl.cdiv(tl.maximum(tl.cdiv(lengths, wanted), 1), block_keys) * block_keys
    return first_keys, sizes, tl.maximum(tl.cdiv(lengths, sizes), 1)


cut_rows = triton.jit(_cut_rows)


def _load(
    seq_lens: tl.tensor,
    chunk: tl.tensor,
    slack_eighths: tl.tensor,
    window: tl.tensor,
    block_keys: tl.constexpr,
) -> tl.tensor:
    """How many places the rows take with such chunks, each _WHOLE. A row of one chunk counts by its
    length, as it ends early."""
    slack = chunk * slack_eighths // 8
    first_keys, _, num_chunks = cut_rows(seq_lens, chunk, slack, window, block_keys)
    share = tl.minimum((seq_lens - first_keys) * _WHOLE // chunk, _WHOLE)
    return tl.sum(tl.where(num_chunks > 1, num_chunks * _WHOLE, share))


load_of = triton.jit(_load)


def _fitting_chunk(
    seq_lens: tl.tensor,
    ideal: tl.tensor,
    slack_eighths: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    block_keys: tl.constexpr,
) -> tl.tensor:
    """ideal, or as much more that rounding rows' shares up makes no more chunks than can run at
    once, where up to half more is enough: what is left over would run alone, behind the others."""
    fitting = ideal
    num_growths = 0
    load = load_of(seq_lens, fitting, slack_eighths, window, block_keys)
    while (load > target_chunks * _WHOLE) & (num_growths < _NUM_GROWTHS):
        fitting += ideal // _GROWTHS_TO_DOUBLE
        num_growths += 1
        load = load_of(seq_lens, fitting, slack_eighths, window, block_keys)
    return fitting


fitting_chunk = triton.jit(_fitting_chunk)


def _span(
    seq_lens: tl.tensor,
    chunk: tl.tensor,
    slack_eighths: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    block_keys: tl.constexpr,
) -> tl.tensor:
    """How many keys one place attends to, one chunk behind the other, where target_chunks run at
    once and all are as long as the longest. A chunk begins and joins for as long as it attends to
    _CHUNK_COST_KEYS."""
    slack = chunk * slack_eighths // 8
    first_keys, sizes, num_chunks = cut_rows(seq_lens, chunk, slack, window, block_keys)
    num_chunks = tl.sum(tl.where(seq_lens > first_keys, num_chunks, 0))
    return (tl.max(sizes) + _CHUNK_COST_KEYS) * tl.cdiv(num_chunks, target_chunks)


span = triton.jit(_span)


def _chunk_of_waves(
    seq_lens: tl.tensor,
    num_keys: tl.tensor,
    min_chunk: tl.tensor,
    slack_eighths: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    block_keys: tl.constexpr,
    max_waves: tl.constexpr,
) -> tl.tensor:
    """The chunk of the shortest span among those that fill all places once, twice, ...; more waves
    have to be shorter by an eighth. Rows between a third of the places and all of them leave many
    empty if all chunks are to run at once."""
    ideal = tl.maximum(tl.cdiv(num_keys, target_chunks), min_chunk)
    chosen = fitting_chunk(seq_lens, ideal, slack_eighths, window, target_chunks, block_keys)
    if max_waves > 1:
        shortest = span(seq_lens, chosen, slack_eighths, window, target_chunks, block_keys)
        for waves in tl.static_range(2, max_waves + 1):
            places = target_chunks * waves
            ideal = tl.maximum(tl.cdiv(num_keys, places), min_chunk)
            chunk = fitting_chunk(seq_lens, ideal, slack_eighths, window, places, block_keys)
            length = span(seq_lens, chunk, slack_eighths, window, target_chunks, block_keys)
            is_shorter = length * 8 <= shortest * 7
            chosen = tl.where(is_shorter, chunk, chosen)
            shortest = tl.where(is_shorter, length, shortest)
    return chosen


chunk_of_waves = triton.jit(_chunk_of_waves)


def _read_chunk(plan: tl.tensor, item: tl.tensor) -> tl.tensor:
    """A chunk's row, start, stop, number of chunks, first chunk and number of keys."""
    chunk = plan + PLAN_HEADER + item * CHUNK_FIELDS
    row, start, stop = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    return row, start, stop, tl.load(chunk + 3), tl.load(chunk + 4), tl.load(chunk + 5)


read_chunk = triton.jit(_read_chunk)


def _plan_chunks(  # noqa: PLR0913
    cache_seqlens: tl.tensor,
    plan: tl.tensor,
    num_rows: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    min_chunk: tl.tensor,
    slack_eighths: tl.tensor,
    block_keys: tl.constexpr,
    kv_heads: tl.constexpr,
    block_rows: tl.constexpr,
    compared_rows: tl.constexpr,
    max_waves: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """One program. The rows of the longest chunks come first: what starts last ends soonest."""
    if is_dependent:
        gdc_wait()
    rows = tl.arange(0, block_rows)
    is_row = rows < num_rows
    seq_lens = tl.load(cache_seqlens + rows, mask=is_row, other=0)
    lengths = seq_lens - tl.maximum(seq_lens - window, 0) // block_keys * block_keys
    ideal = chunk_of_waves(
        seq_lens, tl.sum(lengths), min_chunk, slack_eighths, window, target_chunks, block_keys,
        max_waves,
    )  # fmt: skip
    slack = ideal * slack_eighths // 8
    first_keys, sizes, num_chunks = cut_rows(seq_lens, ideal, slack, window, block_keys)
    num_chunks = tl.where(is_row, num_chunks, 0)
    first_items = tl.zeros((block_rows,), tl.int32)
    for start in range(0, num_rows, compared_rows):
        others = start + tl.arange(0, compared_rows)
        is_other = others < num_rows
        other_lens = tl.load(cache_seqlens + others, mask=is_other, other=0)
        _, other_sizes, other_chunks = cut_rows(other_lens, ideal, slack, window, block_keys)
        is_longer = other_sizes[None, :] > sizes[:, None]
        is_earlier = (other_sizes[None, :] == sizes[:, None]) & (others[None, :] < rows[:, None])
        counts = tl.where((is_longer | is_earlier) & is_other[None, :], other_chunks[None, :], 0)
        first_items += tl.sum(counts, 1)
    tl.store(plan, tl.sum(num_chunks))
    for i in range(0, tl.max(num_chunks)):
        is_chunk = i < num_chunks
        chunk = plan + PLAN_HEADER + (first_items + i) * CHUNK_FIELDS
        starts = first_keys + i * sizes
        tl.store(chunk, rows, mask=is_chunk)
        tl.store(chunk + 1, starts, mask=is_chunk)
        tl.store(chunk + 2, tl.minimum(starts + sizes, seq_lens), mask=is_chunk)
        tl.store(chunk + 3, num_chunks, mask=is_chunk)
        tl.store(chunk + 4, first_items, mask=is_chunk)
        tl.store(chunk + 5, seq_lens, mask=is_chunk)
    counters = plan + PLAN_HEADER + max_items * CHUNK_FIELDS + rows * kv_heads
    for head in range(kv_heads):
        tl.store(counters + head, tl.zeros((block_rows,), tl.int32), mask=is_row)


# Values that change from step to step must not make Triton compile a variant each.
_PLAN_VALUES = (
    "cache_seqlens",
    "num_rows",
    "max_items",
    "window",
    "target_chunks",
    "min_chunk",
    "slack_eighths",
)

plan_chunks_kernel = triton.jit(
    _plan_chunks, do_not_specialize=_PLAN_VALUES, do_not_specialize_on_alignment=_PLAN_VALUES
)
