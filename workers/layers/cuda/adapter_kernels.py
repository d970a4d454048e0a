"""The two kernels of what adapters add to a product: shrink to their rank, expand to the outputs.

A program is of one adapter and goes through that adapter's tokens, so that its matrices are read
once for all of them; programs of adapters that no token has end at once. Of a slot's ranks whole
blocks are read: what a block has beyond the adapter's own is zeros in both matrices. Sums are in
float32. Masks say what they can by constants and hints: of a mask that may change from element to
element a thread loads one element at a time.
"""

import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, prefetch_lines


def _run_tokens_of(places: tl.tensor, is_row: tl.tensor) -> tl.tensor:
    return tl.load(places, mask=is_row, other=0).to(tl.int64)


tokens_of = triton.jit(_run_tokens_of)


def _shrink(  # noqa: PLR0913
    x: tl.tensor,
    a: tl.tensor,
    shrunk: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    ranks: tl.tensor,
    num_tokens: tl.tensor,
    num_inputs: tl.tensor,
    inputs_per_split: tl.tensor,
    x_stride: tl.tensor,
    NUM_PARTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_RANK: tl.constexpr,  # noqa: N803
    BLOCK_INPUTS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Of a slot, a block of a part's ranks and a split of the inputs."""
    slot = tl.program_id(0) + 1
    blocks_a_part: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
    part = tl.program_id(1) // blocks_a_part
    own = (tl.program_id(1) % blocks_a_part) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    split = tl.program_id(2)
    begin_dependent(IS_DEPENDENT)
    count = tl.load(counts + slot)
    rank = tl.load(ranks + slot * NUM_PARTS + part)
    is_own = own < MAX_RANK
    columns = part * MAX_RANK + own
    weights = a + (slot.to(tl.int64) * NUM_PARTS * MAX_RANK + columns[:, None]) * num_inputs
    first_input = split * inputs_per_split
    stop_input = tl.minimum(first_input + inputs_per_split, num_inputs)
    # No block of ranks that are not there has anything to do.
    num_wanted = tl.where(tl.min(own, 0) < rank, count, 0)
    for first in range(0, num_wanted, BLOCK_TOKENS):
        rows = first + tl.arange(0, BLOCK_TOKENS)
        is_row = rows < count
        tokens = tokens_of(order + slot.to(tl.int64) * num_tokens + rows, is_row)
        total = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), dtype=tl.float32)
        for start in range(first_input, stop_input, BLOCK_INPUTS):
            inputs = start + tl.arange(0, BLOCK_INPUTS)
            is_input = inputs < stop_input
            given = tl.load(
                x + tokens[:, None] * x_stride + inputs[None, :],
                mask=is_row[:, None] & is_input[None, :],
                other=0.0,
            )
            matrix = tl.load(
                weights + inputs[None, :], mask=is_own[:, None] & is_input[None, :], other=0.0
            )
            total = tl.dot(given, tl.trans(matrix), total, input_precision="ieee")
        at = (split * num_tokens + tokens[:, None]) * (NUM_PARTS * MAX_RANK) + columns[None, :]
        tl.store(shrunk + at, total, mask=is_row[:, None] & is_own[None, :])


def _run_sum_splits(
    places: tl.tensor,
    is_real: tl.tensor,
    stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Float32 in places, each split stride elements behind the one before it."""
    total = tl.load(places, mask=is_real, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(places + split * stride, mask=is_real, other=0.0)
    return total


sum_splits = triton.jit(_run_sum_splits)


def _run_output_block(
    block: tl.tensor,
    ALIGNMENT: tl.constexpr,  # noqa: N803
    BLOCK_OUTPUTS: tl.constexpr,  # noqa: N803
) -> tl.tuple:
    """Which part it is of, its outputs, and which of them are there."""
    outputs = tl.multiple_of(tl.load(block + 1), ALIGNMENT) + tl.arange(0, BLOCK_OUTPUTS)
    stop = tl.multiple_of(tl.load(block + 2), ALIGNMENT)
    return tl.load(block), outputs, outputs < stop


output_block = triton.jit(_run_output_block)


def _run_ask_early(
    b: tl.tensor,
    weights: tl.tensor,
    is_there: tl.tensor,
    is_wanted: tl.tensor,
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """For the lines of weights (n, 1) to come to L2 while the predecessor runs. Where b begins
    stands for those that are not there."""
    if IS_DEPENDENT:  # noqa: SIM102 - known when it is compiled, unlike the other
        if is_wanted:
            prefetch_lines(tl.where(is_there, weights.to(tl.int64), b.to(tl.int64)))


ask_early = triton.jit(_run_ask_early)


def _expand(  # noqa: PLR0913
    shrunk: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    ranks: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    NUM_PARTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_RANK: tl.constexpr,  # noqa: N803
    BLOCK_OUTPUTS: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    IS_OWN_PART: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Of a slot and a block of outputs. ALIGNMENT: divides where each block begins and ends.

    IS_OWN_PART: out is what adapters add and nothing else; it is written for every token, zeros for
    those without an adapter, which are slot 0's. Who has which adapter was there before the kernel
    that shrinks began, so that the first weights can be asked for while that one runs. Else what
    adapters add goes on top of what out has.
    """
    slot = tl.program_id(0) if IS_OWN_PART else tl.program_id(0) + 1
    block = blocks + tl.program_id(1) * 3
    part, outputs, is_output = output_block(block, ALIGNMENT, BLOCK_OUTPUTS)
    weights = b + (slot.to(tl.int64) * num_outputs + outputs[:, None]) * MAX_RANK
    if not IS_OWN_PART:
        begin_dependent(IS_DEPENDENT)
    count = tl.load(counts + slot)
    rank = tl.load(ranks + slot * NUM_PARTS + part)
    if IS_OWN_PART:
        ask_early(b, weights, is_output[:, None], count * rank > 0, IS_DEPENDENT)
        begin_dependent(IS_DEPENDENT)
    stride = tl.cast(num_tokens, tl.int64) * (NUM_PARTS * MAX_RANK)
    num_wanted = count if IS_OWN_PART else tl.where(rank > 0, count, 0)
    for first in range(0, num_wanted, BLOCK_TOKENS):
        rows = first + tl.arange(0, BLOCK_TOKENS)
        is_row = rows < count
        tokens = tokens_of(order + slot.to(tl.int64) * num_tokens + rows, is_row)
        given = shrunk + tokens[:, None] * (NUM_PARTS * MAX_RANK) + part * MAX_RANK
        total = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), dtype=tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            own = start + tl.arange(0, BLOCK_RANK)[None, :]
            is_own = own < MAX_RANK
            summed = sum_splits(given + own, is_row[:, None] & is_own, stride, NUM_SPLITS)
            matrix = tl.load(weights + own, mask=is_output[:, None] & is_own, other=0.0)
            rounded = summed.to(matrix.dtype)
            total = tl.dot(rounded, tl.trans(matrix), total, input_precision="ieee")
        place = out + tokens[:, None] * num_outputs + outputs[None, :]
        is_place = is_row[:, None] & is_output[None, :]
        if not IS_OWN_PART:
            total += tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), mask=is_place)


shrink_kernel = triton.jit(_shrink)
expand_kernel = triton.jit(_expand)
