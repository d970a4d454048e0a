"""Triton: the flat page lists of a step's rows in one launch, all on the device.

Tensors in, tensors filled; knows no batch object and no pool. Imports Triton: load it by way of
attention.kernels.providers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.page_lists import PageLists

_PAGES_PER_PROGRAM = 512
_ROWS_PER_PASS = 256


def _fill_page_lists(  # noqa: PLR0913
    req_to_token: tl.tensor,
    req_to_token_stride: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    extend_seq_lens: tl.tensor,
    indptr: tl.tensor,
    last_page_lens: tl.tensor,
    indices: tl.tensor,
    page_size: tl.constexpr,
    pages_per_program: tl.constexpr,
    rows_per_pass: tl.constexpr,
    window: tl.constexpr,
) -> None:
    """Program (row, block): a block of the row's pages; block 0 also writes the row's lengths."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    num_pages = tl.maximum(tl.cdiv(seq_len, page_size), 1)
    begin = tl.zeros((), tl.int32)
    for start in range(0, row, rows_per_pass):
        rows = start + tl.arange(0, rows_per_pass)
        lengths = tl.load(seq_lens + rows, mask=rows < row, other=0)
        pages_before = tl.maximum(tl.cdiv(lengths, page_size), 1)
        begin += tl.sum(tl.where(rows < row, pages_before, 0))
    if block == 0:
        tl.store(indptr + row + 1, begin + num_pages)
        tl.store(last_page_lens + row, (tl.maximum(seq_len, 1) - 1) % page_size + 1)
        if row == 0:
            tl.store(indptr, 0)
    first_page = block * pages_per_program
    if first_page < num_pages:
        pages = first_page + tl.arange(0, pages_per_program)
        is_seen = pages < tl.cdiv(seq_len, page_size)
        if window > 0:
            first_key = seq_len - tl.maximum(tl.load(extend_seq_lens + row), 1) - window + 1
            is_seen = is_seen & (pages >= tl.maximum(first_key, 0) // page_size)
        slot = tl.load(slots + row).to(tl.int64)
        first_tokens = req_to_token + slot * req_to_token_stride + pages * page_size
        cache_indices = tl.load(first_tokens, mask=is_seen, other=0)
        tl.store(indices + begin + pages, cache_indices // page_size, mask=pages < num_pages)


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = ("slots", "seq_lens", "extend_seq_lens", "indptr", "last_page_lens", "indices")

_kernel = triton.jit(
    _fill_page_lists,
    do_not_specialize=_STEP_VALUES,
    do_not_specialize_on_alignment=_STEP_VALUES,
)


def fill_page_lists(
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    lists: PageLists,
    page_size: int,
    max_seq_len: int,
    window: int,
) -> None:
    """Fill the first bs rows of lists.

    req_to_token int32 (num_slots, max_context_len); slots int64 (bs,); seq_lens, extend_seq_lens
    int32 (bs,); max_seq_len: what no seq_lens exceeds, it only sizes the launch. window: 0, or the
    most recent keys that a query sees, its own included, where the others' pages may be somebody
    else's by now: the dummy page then stands for those that no new token sees.
    """
    num_pages = max(1, triton.cdiv(max_seq_len, page_size))
    grid = (slots.shape[0], triton.cdiv(num_pages, _PAGES_PER_PROGRAM))
    _kernel[grid](
        req_to_token,
        req_to_token.stride(0),
        slots,
        seq_lens,
        extend_seq_lens,
        lists.indptr,
        lists.last_page_lens,
        lists.indices,
        page_size=page_size,
        pages_per_program=_PAGES_PER_PROGRAM,
        rows_per_pass=_ROWS_PER_PASS,
        window=window,
    )
