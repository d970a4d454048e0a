"""A decode step's two ends on the device: input tokens before the model, argmax after it.

Both run inside or beside a captured graph: every tensor is static, padding rows included.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.graphs.decode_step import FIRST_CACHE_FIELD, StepRing, StepRows, TokenRows
from workers.layers.cuda.launch import next_power_of_2
from workers.layers.cuda.token_rows import gather_rows
from workers.layers.cuda.tree_paths import mark_ancestors

VOCAB_BLOCK = 4096


def _begin_step(  # noqa: PLR0913
    ring_rows: tl.tensor,
    next_slot: tl.tensor,
    current: tl.tensor,
    last_token_ids: tl.tensor,
    req_to_token: tl.tensor,
    slots: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    out_cache_loc: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    slot_stride: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    NUM_FIELDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program. The host's memory is read past the caches: it changes between launches."""
    ring_slot = tl.load(next_slot)
    host_rows = ring_rows + ring_slot * slot_stride
    rows = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    slot = tl.load(host_rows + rows, mask=is_row, other=0, volatile=True).to(tl.int64)
    seq_len = tl.load(host_rows + row_stride + rows, mask=is_row, other=0, volatile=True)
    token = tl.load(host_rows + 2 * row_stride + rows, mask=is_row, other=0, volatile=True)
    cache_index = tl.load(host_rows + 3 * row_stride + rows, mask=is_row, other=0, volatile=True)
    number = tl.load(host_rows + NUM_FIELDS * row_stride, volatile=True)
    token = token.to(tl.int64)
    last = tl.load(last_token_ids + slot, mask=is_row, other=0)
    position = tl.maximum(seq_len - 1, 0)
    tl.store(slots + rows, slot, mask=is_row)
    tl.store(input_ids + rows, tl.where(token < 0, last, token), mask=is_row)
    tl.store(positions + rows, position.to(tl.int64), mask=is_row)
    tl.store(seq_lens + rows, seq_len, mask=is_row)
    tl.store(prefix_lens + rows, position, mask=is_row)
    tl.store(out_cache_loc + rows, cache_index.to(tl.int64), mask=is_row)
    tl.store(req_to_token + slot * table_stride + position, cache_index, mask=is_row)
    tl.store(current, ring_slot)
    tl.store(current + 1, number)


_begin_step_kernel = triton.jit(_begin_step, do_not_specialize=("num_rows",))


def _place_rows(  # noqa: PLR0913
    cache_indices: tl.tensor,
    current: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    cache_loc: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program, behind _begin_step: where the rows' tokens go in one more account.

    cache_indices: the account's field of the ring's first slot.
    """
    rows = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    host_row = cache_indices + tl.load(current) * slot_stride + rows
    cache_index = tl.load(host_row, mask=is_row, other=0, volatile=True)
    slot = tl.load(slots + rows, mask=is_row, other=0)
    position = tl.load(positions + rows, mask=is_row, other=0)
    tl.store(cache_loc + rows, cache_index.to(tl.int64), mask=is_row)
    tl.store(table + slot * table_stride + position, cache_index, mask=is_row)


_place_rows_kernel = triton.jit(_place_rows, do_not_specialize=("num_rows", "cache_indices"))


def _block_argmax(
    logits: tl.tensor,
    block_max: tl.tensor,
    block_token: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    first_token: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One block of one row. block_token is -1 where the block holds a NaN. first_token: whose
    logit stands first."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits + row * row_stride + tokens, mask=tokens < num_tokens, other=float("-inf")
    ).to(tl.float32)
    is_nan = values != values
    values = tl.where(is_nan, float("-inf"), values)
    largest = tl.max(values, axis=0)
    first = first_token + tl.min(tl.where(values == largest, tokens, num_tokens), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    at = row * tl.num_programs(1) + block
    tl.store(block_max + at, largest)
    tl.store(block_token + at, tl.where(has_nan, -1, first))


_block_argmax_kernel = triton.jit(_block_argmax, do_not_specialize=("first_token",))


def _end_step(  # noqa: PLR0913
    block_max: tl.tensor,
    block_token: tl.tensor,
    slots: tl.tensor,
    last_token_ids: tl.tensor,
    ring_sampled: tl.tensor,
    next_slot: tl.tensor,
    current: tl.tensor,
    num_blocks: tl.tensor,
    slot_stride: tl.tensor,
    num_ring_slots: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One row: its token to the host's memory, -1 if there was a NaN, and to its slot."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCK)
    is_block = blocks < num_blocks
    maxima = tl.load(block_max + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    tokens = tl.load(block_token + row * num_blocks + blocks, mask=is_block, other=2147483647)
    largest = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == largest, tokens, 2147483647), axis=0)
    has_nan = tl.min(tokens, axis=0) < 0
    ring_slot = tl.load(current)
    sampled = ring_sampled + ring_slot * slot_stride
    tl.store(sampled + row, tl.where(has_nan, -1, token))
    if row == 0:
        tl.store(sampled + slot_stride - 1, tl.load(current + 1))
        tl.store(next_slot, (ring_slot + 1) % num_ring_slots)
    slot = tl.load(slots + row)
    tl.store(last_token_ids + slot, tl.where(has_nan, 0, token).to(tl.int64))


_end_step_kernel = triton.jit(_end_step)


@dataclass(frozen=True, slots=True)
class TritonStepKernels:
    """The step's ends in three launches, one more for rows of several tokens, and one for each
    account beside account 0. See workers.graphs.decode_step.DecodeStepKernels.

    tables: of each account int32 (slots, positions).
    """

    tables: tuple[torch.Tensor, ...]
    last_token_ids: torch.Tensor

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        num_rows = rows.slots.shape[0]
        _begin_step_kernel[(1,)](
            ring.rows,
            ring.next_slot,
            ring.current,
            self.last_token_ids,
            self.tables[0],
            rows.slots,
            rows.input_ids,
            rows.positions,
            rows.out_cache_loc,
            rows.seq_lens,
            rows.prefix_lens,
            ring.rows.stride(0),
            ring.rows.stride(1),
            self.tables[0].stride(0),
            num_rows,
            NUM_FIELDS=ring.num_fields,
            BLOCK=next_power_of_2(num_rows),
            num_warps=4,
        )
        for account, locs in enumerate(rows.bounded_cache_locs, start=1):
            table = self.tables[account]
            _place_rows_kernel[(1,)](
                ring.rows[0, FIRST_CACHE_FIELD + account],
                ring.current,
                rows.slots,
                rows.positions,
                table,
                locs,
                ring.rows.stride(0),
                table.stride(0),
                num_rows,
                BLOCK=next_power_of_2(num_rows),
                num_warps=4,
            )

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        gather_rows(tokens, named, rows)

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        mark_ancestors(parents, num_tokens, cells)

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        size = logits.shape[0], num_vocab_blocks(logits.shape[1])
        block_max = torch.empty(size, dtype=torch.float32, device=logits.device)
        block_token = torch.empty(size, dtype=torch.int32, device=logits.device)
        block_argmax(logits, logits.shape[1], 0, (block_max, block_token))
        end_step((block_max, block_token), slots, self.last_token_ids, ring)


def num_vocab_blocks(num_tokens: int) -> int:
    """Into how many blocks block_argmax cuts so many logits."""
    return -(-num_tokens // VOCAB_BLOCK)


Maxima = tuple[torch.Tensor, torch.Tensor]
"""The largest logit of each block, float32 (n, blocks), and its token, int32, -1 for a NaN."""


def block_argmax(logits: torch.Tensor, num_tokens: int, first_token: int, maxima: Maxima) -> None:
    """Fill maxima from logits (n, num_tokens or more), which are those of first_token and on.

    The lowest of equal tokens counts. Contiguous but for the rows of logits.
    """
    block_max, block_token = maxima
    _block_argmax_kernel[block_max.shape](
        logits,
        block_max,
        block_token,
        logits.stride(0),
        num_tokens,
        first_token,
        BLOCK=VOCAB_BLOCK,
        num_warps=4,
    )


def end_step(
    maxima: Maxima, slots: torch.Tensor, last_token_ids: torch.Tensor, ring: StepRing
) -> None:
    """A token a row from maxima of the whole vocabulary; see DecodeStepKernels.end."""
    block_max, block_token = maxima
    num_rows, num_blocks = block_max.shape
    _end_step_kernel[(num_rows,)](
        block_max,
        block_token,
        slots,
        last_token_ids,
        ring.sampled,
        ring.next_slot,
        ring.current,
        num_blocks,
        ring.sampled.stride(0),
        ring.num_slots,
        BLOCK=next_power_of_2(num_blocks),
        num_warps=1,
    )
