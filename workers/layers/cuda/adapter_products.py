"""What adapters add to a product: shrink to their rank, then expand, for all adapters of a step.

Two launches for a layer, however many adapters its tokens have. A program is of one adapter and
goes through that adapter's tokens, so that its matrices are read once for all of them; programs of
adapters that no token has end at once. Ranks are the adapters' own: what a slot has beyond them is
not read. Sums are in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.adapter_groups import TokenGroups
from workers.layers.cuda.launch import begin_dependent, dependent_launch


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """What a program has at once, and how many share the inputs of a shrink (num_splits). Not
    measured yet: benchmarks/h200/adapter_products.py does."""

    tokens: int = 16
    rank: int = 16
    inputs: int = 128
    outputs: int = 64
    num_splits: int = 8
    num_warps: int = 4


USUAL_TILES = AdapterTiles()


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
    slot = tl.program_id(0) + 1
    blocks_a_part: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
    part = tl.program_id(1) // blocks_a_part
    own = (tl.program_id(1) % blocks_a_part) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    split = tl.program_id(2)
    begin_dependent(IS_DEPENDENT)
    count = tl.load(counts + slot)
    rank = tl.load(ranks + slot * NUM_PARTS + part)
    is_own = own < rank
    columns = part * MAX_RANK + own
    weights = a + (slot.to(tl.int64) * NUM_PARTS * MAX_RANK + columns[:, None]) * num_inputs
    first_input = split * inputs_per_split
    stop_input = tl.minimum(first_input + inputs_per_split, num_inputs)
    # No block of ranks that are not there has anything to do.
    num_wanted = tl.where(tl.min(own, 0) < rank, count, 0)
    for first in range(0, num_wanted, BLOCK_TOKENS):
        rows = first + tl.arange(0, BLOCK_TOKENS)
        is_row = rows < count
        tokens = tl.load(order + slot.to(tl.int64) * num_tokens + rows, mask=is_row, other=0)
        tokens = tokens.to(tl.int64)
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
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    slot = tl.program_id(0) + 1
    block = blocks + tl.program_id(1) * 3
    part, first_output, stop_output = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    begin_dependent(IS_DEPENDENT)
    count = tl.load(counts + slot)
    rank = tl.load(ranks + slot * NUM_PARTS + part)
    outputs = first_output + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < stop_output
    weights = b + (slot.to(tl.int64) * num_outputs + outputs[:, None]) * MAX_RANK
    num_wanted = tl.where(rank > 0, count, 0)
    for first in range(0, num_wanted, BLOCK_TOKENS):
        rows = first + tl.arange(0, BLOCK_TOKENS)
        is_row = rows < count
        tokens = tl.load(order + slot.to(tl.int64) * num_tokens + rows, mask=is_row, other=0)
        tokens = tokens.to(tl.int64)
        total = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), dtype=tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            own = start + tl.arange(0, BLOCK_RANK)
            is_own = own < rank
            given = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), dtype=tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                at = (split * num_tokens + tokens[:, None]) * (NUM_PARTS * MAX_RANK)
                given += tl.load(
                    shrunk + at + part * MAX_RANK + own[None, :],
                    mask=is_row[:, None] & is_own[None, :],
                    other=0.0,
                )
            matrix = tl.load(
                weights + own[None, :], mask=is_output[:, None] & is_own[None, :], other=0.0
            )
            given = given.to(matrix.dtype)
            total = tl.dot(given, tl.trans(matrix), total, input_precision="ieee")
        place = out + tokens[:, None] * num_outputs + outputs[None, :]
        is_place = is_row[:, None] & is_output[None, :]
        before = tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(out.dtype.element_ty), mask=is_place)


_shrink_kernel = triton.jit(_shrink)
_expand_kernel = triton.jit(_expand)


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """Of one layer. a (num_slots + 1, parts * max_rank, num_inputs), b (num_slots + 1, num_outputs,
    max_rank): as SiteBank has them. ranks: int32 (num_slots + 1, parts). blocks: int32 (n, 3), of
    the outputs: part, first, stop, as output_blocks has them for the same tiles."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    blocks: torch.Tensor
    tiles: AdapterTiles = USUAL_TILES

    def add_to(self, out: torch.Tensor, x: torch.Tensor, groups: TokenGroups) -> None:
        """out (n, num_outputs), contiguous, += what tokens' adapters make of x (n, num_inputs).

        x: its rows may lie apart.
        """
        shrunk = self.new_shrunk(x)
        self.shrink(shrunk, x, groups)
        self.expand(out, shrunk, groups)

    def new_shrunk(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (num_splits, n, parts * max_rank), of which only what tokens' adapters have is
        ever written or read."""
        size = self.tiles.num_splits, x.shape[0], self.a.shape[1]
        return torch.empty(size, dtype=torch.float32, device=x.device)

    def shrink(
        self,
        shrunk: torch.Tensor,
        x: torch.Tensor,
        groups: TokenGroups,
        follows_own_stream: bool = True,
    ) -> None:
        """follows_own_stream: whether all that it needs was launched on the stream that it is
        launched on, so that it may start before that has ended."""
        tiles, num_parts = self.tiles, self.ranks.shape[1]
        columns, num_inputs = self.a.shape[1:]
        is_dependent = dependent_launch(x) and follows_own_stream
        of_split = triton.cdiv(num_inputs, tiles.num_splits)
        of_split = triton.cdiv(of_split, tiles.inputs) * tiles.inputs
        rank_blocks = num_parts * triton.cdiv(columns // num_parts, tiles.rank)
        _shrink_kernel[(groups.num_slots, rank_blocks, tiles.num_splits)](
            x,
            self.a,
            shrunk,
            groups.order,
            groups.counts,
            self.ranks,
            x.shape[0],
            num_inputs,
            of_split,
            x.stride(0),
            NUM_PARTS=num_parts,
            MAX_RANK=columns // num_parts,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANK=tiles.rank,
            BLOCK_INPUTS=tiles.inputs,
            IS_DEPENDENT=is_dependent,
            num_warps=tiles.num_warps,
            launch_pdl=is_dependent,
        )

    def expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        groups: TokenGroups,
        follows_own_stream: bool = True,
    ) -> None:
        """As shrink. Its successor may start early either way."""
        tiles, num_parts = self.tiles, self.ranks.shape[1]
        is_dependent = dependent_launch(out)
        _expand_kernel[(groups.num_slots, self.blocks.shape[0])](
            shrunk,
            self.b,
            out,
            self.blocks,
            groups.order,
            groups.counts,
            self.ranks,
            shrunk.shape[1],
            out.shape[1],
            NUM_PARTS=num_parts,
            MAX_RANK=shrunk.shape[2] // num_parts,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANK=tiles.rank,
            BLOCK_OUTPUTS=tiles.outputs,
            IS_DEPENDENT=is_dependent,
            num_warps=tiles.num_warps,
            launch_pdl=is_dependent and follows_own_stream,
        )


def output_blocks(
    parts: Sequence[slice], device: torch.device, tiles: AdapterTiles = USUAL_TILES
) -> torch.Tensor:
    """AdapterMatrices.blocks. parts: of the outputs, each with a start and a stop."""
    blocks = [
        (part, first, rows.stop)
        for part, rows in enumerate(parts)
        for first in range(rows.start, rows.stop, tiles.outputs)
    ]
    return torch.tensor(blocks, dtype=torch.int32, device=device)
