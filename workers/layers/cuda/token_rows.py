"""What a step of rows of several tokens reads of its rows, from their tokens, in one launch."""

import torch
import triton
import triton.language as tl

from workers.graphs.decode_step import StepRows, TokenRows
from workers.layers.cuda.launch import next_power_of_2


def _gather_rows(  # noqa: PLR0913
    named: tl.tensor,
    input_ids: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    row_slots: tl.tensor,
    row_seq_lens: tl.tensor,
    row_prefix_lens: tl.tensor,
    num_tokens: tl.tensor,
    tokens_per_row: tl.tensor,
    HAS_NAMED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A block of tokens a program."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    if HAS_NAMED:
        name = tl.load(named + tokens, mask=is_token, other=-1)
        tl.store(input_ids + tokens, name, mask=name >= 0)
    rows, places = tokens // tokens_per_row, tokens % tokens_per_row
    is_first = is_token & (places == 0)
    is_last = is_token & (places == tokens_per_row - 1)
    tl.store(row_slots + rows, tl.load(slots + tokens, mask=is_first), mask=is_first)
    prefixes = tl.load(prefix_lens + tokens, mask=is_first)
    tl.store(row_prefix_lens + rows, prefixes, mask=is_first)
    tl.store(row_seq_lens + rows, tl.load(seq_lens + tokens, mask=is_last), mask=is_last)


_gather_rows_kernel = triton.jit(_gather_rows, do_not_specialize=("num_tokens", "tokens_per_row"))
_MAX_BLOCK = 512


def gather_rows(tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
    """See workers.graphs.decode_step.DecodeStepKernels."""
    num_tokens, num_rows = len(tokens.input_ids), len(rows.slots)
    block = min(_MAX_BLOCK, next_power_of_2(num_tokens))
    _gather_rows_kernel[(triton.cdiv(num_tokens, block),)](
        tokens.input_ids if named is None else named,
        tokens.input_ids,
        tokens.slots,
        tokens.seq_lens,
        tokens.prefix_lens,
        rows.slots,
        rows.seq_lens,
        rows.prefix_lens,
        num_tokens,
        num_tokens // num_rows,
        HAS_NAMED=named is not None,
        BLOCK=block,
        num_warps=4,
    )
