"""The kernels of what adapters add to chosen experts: shrink to their rank, expand to the outputs.

A program takes a block of rows of one expert, as expert_gemm.py's do, and goes through the adapters
that its rows have: a prompt's block of one adapter reads that one's matrices once, a decode step's
block of many each row's own. Rows of other adapters, or of none, are neither read nor written for
one. Of a slot's ranks whole blocks are read: what a block has beyond the adapter's own is zeros in
both matrices. Sums are in float32. Knows no routing, and not what the experts themselves compute.

Proved by Triton's interpreter and by compiling for sm90; it has run on no GPU.
"""

import triton
import triton.language as tl

from workers.layers.cuda.adapter_kernels import sum_splits
from workers.layers.cuda.launch import begin_dependent

RANK_COLUMNS = tl.constexpr(3)
"""Of ranks: gate's, up's and down's."""

_NO_SLOT = tl.constexpr(2**31 - 1)


def _run_rows_of_block(
    pairs: tl.tensor,
    blocks: tl.tensor,
    slot_of_token: tl.tensor,
    block: tl.tensor,
    max_blocks: tl.tensor,
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tl.tuple:
    """Its expert (int64), and of each row the place in pairs (int64), the pair, and the adapter's
    slot: 0 for none, and for rows that the block does not have."""
    rows = tl.arange(0, ROWS)
    is_real = rows < tl.load(blocks + 2 * max_blocks + block)
    place = tl.load(blocks + max_blocks + block) + rows
    pair = tl.load(pairs + place, mask=is_real, other=0)
    slots = tl.load(slot_of_token + pair // NUM_CHOSEN, mask=is_real, other=0)
    return tl.load(blocks + block).to(tl.int64), place.to(tl.int64), pair, slots


_rows_of_block = triton.jit(_run_rows_of_block)


def _run_slot_above(slots: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The smallest of slots above the last one, _NO_SLOT where there is none."""
    return tl.min(tl.where(slots > last, slots, _NO_SLOT), axis=0)


_slot_above = triton.jit(_run_slot_above)


def _run_shrunk(  # noqa: PLR0913
    x_at: tl.tensor,
    a_at: tl.tensor,
    is_row: tl.tensor,
    is_rank: tl.tensor,
    first: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    OF_SPLIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """x_at: pointers (ROWS,), a_at: (RANKS,), both to their input 0. Of OF_SPLIT inputs from first
    on, as far as there are: float32 (ROWS, RANKS)."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + OF_SPLIT, DEPTH_SIZE), DEPTH):
        is_inner = depth < (DEPTH_SIZE - start if DEPTH_SIZE % DEPTH else DEPTH)
        inputs = start + depth
        is_given = is_row[:, None] & is_inner[None, :]
        given = tl.load(x_at[:, None] + inputs[None, :], mask=is_given, other=0.0)
        is_weight = is_rank[:, None] & is_inner[None, :]
        matrix = tl.load(a_at[:, None] + inputs[None, :], mask=is_weight, other=0.0)
        total = tl.dot(given, tl.trans(matrix), total, input_precision="ieee")
    return total


_shrunk = triton.jit(_run_shrunk)


def _shrink(  # noqa: PLR0913
    x: tl.tensor,
    a: tl.tensor,
    shrunk: tl.tensor,
    slot_of_token: tl.tensor,
    ranks: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    max_blocks: tl.tensor,
    num_pairs: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    FIRST_PART: tl.constexpr,  # noqa: N803
    NUM_PARTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    IS_BY_TOKEN: tl.constexpr,  # noqa: N803
    OF_SPLIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Of a block, RANKS ranks of one of NUM_PARTS parts, and a split of OF_SPLIT inputs. x has rows
    of tokens (IS_BY_TOKEN) or of pairs in their places. Parts from FIRST_PART on have a's ranks."""
    begin_dependent(IS_DEPENDENT)
    block = tl.program_id(0) % max_blocks
    if block < tl.load(num_blocks):
        expert, place, pair, slots = _rows_of_block(
            pairs, blocks, slot_of_token, block, max_blocks, NUM_CHOSEN, ROWS
        )
        tile = tl.program_id(0) // max_blocks
        tiles_a_part: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
        part, first_rank = tile // tiles_a_part, tile % tiles_a_part * RANKS
        own = tl.arange(0, RANKS)
        is_rank = own < (MAX_RANK - first_rank if MAX_RANK % RANKS else RANKS)
        column = part * MAX_RANK + first_rank + own
        row = (pair // NUM_CHOSEN).to(tl.int64) if IS_BY_TOKEN else place
        split = tl.program_id(1)
        target = shrunk + (split.to(tl.int64) * num_pairs + place)[:, None] * (NUM_PARTS * MAX_RANK)
        slot = _slot_above(slots, 0)
        while slot < _NO_SLOT:
            # No block of ranks that are not there has anything to do, and nobody reads it.
            if first_rank < tl.load(ranks + slot * RANK_COLUMNS + FIRST_PART + part):
                is_row = slots == slot
                of_slot = (slot.to(tl.int64) * NUM_EXPERTS + expert) * (NUM_PARTS * MAX_RANK)
                a_at = a + (of_slot + column) * DEPTH_SIZE
                x_at, first = x + row * DEPTH_SIZE, split * OF_SPLIT
                total = _shrunk(
                    x_at, a_at, is_row, is_rank, first, DEPTH_SIZE, OF_SPLIT, ROWS, RANKS, DEPTH
                )
                tl.store(target + column[None, :], total, mask=is_row[:, None] & is_rank[None, :])
            slot = _slot_above(slots, slot)


def _run_expanded(  # noqa: PLR0913
    shrunk_at: tl.tensor,
    b_at: tl.tensor,
    is_row: tl.tensor,
    is_output: tl.tensor,
    rank: tl.tensor,
    stride: tl.tensor,
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """shrunk_at: pointers (rows,), b_at: (outputs,), both to their rank 0: float32 (rows, outputs).
    Of what was shrunk splits lie stride elements apart; their sum is rounded to b's dtype."""
    total = tl.full((shrunk_at.shape[0], b_at.shape[0]), 0.0, dtype=tl.float32)
    for start in range(0, rank, RANKS):
        own = start + tl.arange(0, RANKS)[None, :]
        is_rank = own < MAX_RANK
        is_given = is_row[:, None] & is_rank
        summed = sum_splits(shrunk_at[:, None] + own, is_given, stride, NUM_SPLITS)
        matrix = tl.load(b_at[:, None] + own, mask=is_output[:, None] & is_rank, other=0.0)
        total = tl.dot(summed.to(matrix.dtype), tl.trans(matrix), total, input_precision="ieee")
    return total


_expanded = triton.jit(_run_expanded)


def _run_outputs_from(
    first: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
) -> tl.tuple:
    """OUTPUTS of them, and which of them are among WIDTH: all, if OUTPUTS divides it."""
    lane = tl.arange(0, OUTPUTS)
    return first + lane, lane < (WIDTH - first if WIDTH % OUTPUTS else OUTPUTS)


_outputs_from = triton.jit(_run_outputs_from)


def _expand_gate_up(  # noqa: PLR0913
    shrunk: tl.tensor,
    b: tl.tensor,
    added: tl.tensor,
    slot_of_token: tl.tensor,
    ranks: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    max_blocks: tl.tensor,
    num_pairs: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Of a block and OUTPUTS of gate's or of up's outputs, as AddedRows has them: all rows with an
    adapter are written, zeros where it leaves the part as it is."""
    begin_dependent(IS_DEPENDENT)
    block = tl.program_id(0) % max_blocks
    if block < tl.load(num_blocks):
        expert, place, _, slots = _rows_of_block(
            pairs, blocks, slot_of_token, block, max_blocks, NUM_CHOSEN, ROWS
        )
        tile = tl.program_id(0) // max_blocks
        tiles_a_part: tl.constexpr = (WIDTH + OUTPUTS - 1) // OUTPUTS
        part = tile // tiles_a_part
        own, is_output = _outputs_from(tile % tiles_a_part * OUTPUTS, WIDTH, OUTPUTS)
        output = part * WIDTH + own
        stride = tl.cast(num_pairs, tl.int64) * (2 * MAX_RANK)
        shrunk_at = shrunk + place * (2 * MAX_RANK) + part * MAX_RANK
        target = added + place[:, None] * (2 * WIDTH) + output[None, :]
        slot = _slot_above(slots, 0)
        while slot < _NO_SLOT:
            is_row = slots == slot
            rank = tl.load(ranks + slot * RANK_COLUMNS + part)
            of_slot = (slot.to(tl.int64) * NUM_EXPERTS + expert) * (2 * WIDTH)
            b_at = b + (of_slot + output) * MAX_RANK
            total = _expanded(
                shrunk_at, b_at, is_row, is_output, rank, stride, MAX_RANK, NUM_SPLITS, RANKS
            )
            is_place = is_row[:, None] & is_output[None, :]
            tl.store(target, total.to(added.dtype.element_ty), mask=is_place)
            slot = _slot_above(slots, slot)


def _expand_down(  # noqa: PLR0913
    shrunk: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    weights: tl.tensor,
    slot_of_token: tl.tensor,
    ranks: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    max_blocks: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Of a block and OUTPUTS outputs: weight times them on top of what out has at (choice, token),
    which no other program touches."""
    begin_dependent(IS_DEPENDENT)
    block = tl.program_id(0) % max_blocks
    if block < tl.load(num_blocks):
        expert, place, pair, slots = _rows_of_block(
            pairs, blocks, slot_of_token, block, max_blocks, NUM_CHOSEN, ROWS
        )
        tile = tl.program_id(0) // max_blocks
        output, is_output = _outputs_from(tile * OUTPUTS, WIDTH, OUTPUTS)
        stride = tl.cast(num_tokens, tl.int64) * (NUM_CHOSEN * MAX_RANK)
        shrunk_at = shrunk + place * MAX_RANK
        row = (pair % NUM_CHOSEN).to(tl.int64) * num_tokens + pair // NUM_CHOSEN
        target = out + row[:, None] * WIDTH + output[None, :]
        slot = _slot_above(slots, 0)
        while slot < _NO_SLOT:
            rank = tl.load(ranks + slot * RANK_COLUMNS + 2)
            if rank > 0:
                is_row = slots == slot
                of_slot = (slot.to(tl.int64) * NUM_EXPERTS + expert) * WIDTH
                b_at = b + (of_slot + output) * MAX_RANK
                total = _expanded(
                    shrunk_at, b_at, is_row, is_output, rank, stride, MAX_RANK, NUM_SPLITS, RANKS
                )
                total *= tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
                is_place = is_row[:, None] & is_output[None, :]
                total += tl.load(target, mask=is_place, other=0.0).to(tl.float32)
                tl.store(target, total.to(out.dtype.element_ty), mask=is_place)
            slot = _slot_above(slots, slot)


# Numbers that differ from step to step make no kernels of their own.
shrink_kernel = triton.jit(_shrink, do_not_specialize=["max_blocks", "num_pairs"])
expand_gate_up_kernel = triton.jit(_expand_gate_up, do_not_specialize=["max_blocks", "num_pairs"])
expand_down_kernel = triton.jit(_expand_down, do_not_specialize=["max_blocks", "num_tokens"])
