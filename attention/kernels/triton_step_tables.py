"""Triton: a step's lengths, cumulative lengths and page table in one launch, all on the device.

Tensors in, tensors filled; knows no batch object and no pool. Imports Triton: load it by way of
attention.kernels.providers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.step_tables import StepTables

_PAGES_PER_PROGRAM = 512
_ROWS_PER_PASS = 256


def _fill_step_tables(  # noqa: PLR0913
    req_to_token: tl.tensor,
    req_to_token_stride: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    extend_seq_lens: tl.tensor,
    cache_seqlens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    page_table: tl.tensor,
    page_table_stride: tl.tensor,
    page_size: tl.constexpr,
    pages_per_program: tl.constexpr,
    rows_per_pass: tl.constexpr,
    window: tl.constexpr,
) -> None:
    """Program (row, block): a block of the row's pages; block 0 also writes the row's lengths."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    if block == 0:
        queries = tl.zeros((), tl.int32)
        keys = tl.zeros((), tl.int32)
        for start in range(0, row + 1, rows_per_pass):
            rows = start + tl.arange(0, rows_per_pass)
            queries += tl.sum(tl.load(extend_seq_lens + rows, mask=rows <= row, other=0))
            keys += tl.sum(tl.load(seq_lens + rows, mask=rows <= row, other=0))
        tl.store(cache_seqlens + row, seq_len)
        tl.store(cu_seqlens_q + row + 1, queries)
        tl.store(cu_seqlens_k + row + 1, keys)
        if row == 0:
            tl.store(cu_seqlens_q, 0)
            tl.store(cu_seqlens_k, 0)
    num_pages = tl.cdiv(seq_len, page_size)
    first_page = block * pages_per_program
    if first_page < num_pages:
        pages = first_page + tl.arange(0, pages_per_program)
        is_used = pages < num_pages
        slot = tl.load(slots + row).to(tl.int64)
        first_tokens = req_to_token + slot * req_to_token_stride + pages * page_size
        is_seen = is_used
        if window > 0:
            first_key = seq_len - tl.maximum(tl.load(extend_seq_lens + row), 1) - window + 1
            is_seen = is_used & (pages >= tl.maximum(first_key, 0) // page_size)
        cache_indices = tl.load(first_tokens, mask=is_seen, other=0)
        row_table = page_table + row.to(tl.int64) * page_table_stride
        tl.store(row_table + pages, cache_indices // page_size, mask=is_used)


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = (
    "slots",
    "seq_lens",
    "extend_seq_lens",
    "cache_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "page_table_stride",
)

_kernel = triton.jit(
    _fill_step_tables,
    do_not_specialize=_STEP_VALUES,
    do_not_specialize_on_alignment=_STEP_VALUES,
)


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
    """Fill the first bs rows of tables.

    req_to_token int32 (num_slots, max_context_len); slots int64 (bs,); seq_lens, extend_seq_lens
    int32 (bs,); max_seq_len: a host copy of seq_lens' maximum, it only sizes the launch. Entries
    of the page table past a row's last page keep what they held. window: 0, or the most recent
    keys that a query sees, its own included, where the others' pages may be somebody else's by now:
    the dummy page then stands for those that no new token sees. Kernels load whole blocks of keys,
    those before the window too, and multiply values by zero there.
    """
    num_pages = triton.cdiv(max_seq_len, page_size)
    grid = (slots.shape[0], max(1, triton.cdiv(num_pages, _PAGES_PER_PROGRAM)))
    _kernel[grid](
        req_to_token,
        req_to_token.stride(0),
        slots,
        seq_lens,
        extend_seq_lens,
        tables.cache_seqlens,
        tables.cu_seqlens_q,
        tables.cu_seqlens_k,
        tables.page_table,
        tables.page_table.stride(0),
        page_size=page_size,
        pages_per_program=_PAGES_PER_PROGRAM,
        rows_per_pass=_ROWS_PER_PASS,
        window=window,
    )
