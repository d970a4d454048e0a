"""What adapters add to a product: shrink to their rank, then expand, for all adapters of a step.

Two launches for a layer, however many adapters its tokens have (adapter_kernels.py). Ranks are the
adapters' own: of what a slot has beyond them at most a block is read, which is zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from workers.layers.cuda.adapter_groups import TokenGroups
from workers.layers.cuda.adapter_kernels import expand_kernel, shrink_kernel
from workers.layers.cuda.launch import dependent_launch, next_power_of_2

_MANY_INPUTS = 8192
_MIN_DOT = 16
"""Of each side of what tensor cores multiply."""


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """What a program has at once, and how many share up to 8,192 inputs of a shrink (num_splits;
    of more inputs twice as many), whose loads have num_stages. Found on an H200 with 8 adapters of
    rank 32 and 64 tokens: benchmarks/h200/adapter_products.py."""

    tokens: int = 16
    rank: int = 32
    inputs: int = 128
    outputs: int = 256
    num_splits: int = 4
    num_warps: int = 4
    num_stages: int = 3

    def splits_of(self, num_inputs: int) -> int:
        return 2 * self.num_splits if num_inputs > _MANY_INPUTS else self.num_splits

    def rank_block(self, max_rank: int) -> int:
        return min(self.rank, max(_MIN_DOT, next_power_of_2(max_rank)))


USUAL_TILES = AdapterTiles()


@dataclass(frozen=True, slots=True)
class OutputBlocks:
    """places: int32 (n, 3), of the outputs: part, first, stop. alignment: divides every first and
    stop; at most 16, a power of two."""

    places: torch.Tensor
    alignment: int

    @classmethod
    def of(
        cls, parts: Sequence[slice], device: torch.device, tiles: AdapterTiles = USUAL_TILES
    ) -> "OutputBlocks":
        """parts: of the outputs, each with a start and a stop."""
        places = [
            (part, first, min(first + tiles.outputs, rows.stop))
            for part, rows in enumerate(parts)
            for first in range(rows.start, rows.stop, tiles.outputs)
        ]
        alignment = math.gcd(16, *(edge for _, first, stop in places for edge in (first, stop)))
        return cls(torch.tensor(places, dtype=torch.int32, device=device), alignment)


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """Of one layer. a (num_slots + 1, parts * max_rank, num_inputs), b (num_slots + 1, num_outputs,
    max_rank): as SiteBank has them, zeros beyond a slot's ranks. ranks: int32 (num_slots + 1,
    parts), zeros for slot 0. blocks: for the same tiles."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    blocks: OutputBlocks
    tiles: AdapterTiles = USUAL_TILES

    @property
    def max_rank(self) -> int:
        return self.b.shape[2]

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
        size = self.tiles.splits_of(self.a.shape[2]), x.shape[0], self.a.shape[1]
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
        num_inputs, block_rank = self.a.shape[2], tiles.rank_block(self.max_rank)
        is_dependent = dependent_launch(x) and follows_own_stream
        num_splits = shrunk.shape[0]
        of_split = triton.cdiv(num_inputs, num_splits)
        of_split = triton.cdiv(of_split, tiles.inputs) * tiles.inputs
        rank_blocks = num_parts * triton.cdiv(self.max_rank, block_rank)
        shrink_kernel[(groups.num_slots, rank_blocks, num_splits)](
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
            MAX_RANK=self.max_rank,
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANK=block_rank,
            BLOCK_INPUTS=tiles.inputs,
            IS_DEPENDENT=is_dependent,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            launch_pdl=is_dependent,
        )

    def expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        groups: TokenGroups,
        follows_own_stream: bool = True,
    ) -> None:
        """out (n, num_outputs), contiguous, += what adapters make of what was shrunk.
        follows_own_stream: as shrink has it. Its successor may start early either way."""
        is_dependent = dependent_launch(out)
        options = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent and follows_own_stream}
        self._expand(out, shrunk, groups, groups.num_slots, IS_OWN_PART=False, **options)

    def expand_alone(self, part: torch.Tensor, shrunk: torch.Tensor, groups: TokenGroups) -> None:
        """part (n, num_outputs), contiguous, = what adapters make of what was shrunk, zeros for
        tokens without one. To be launched right behind shrink with follows_own_stream=False: it may
        read groups and matrices before that has ended."""
        is_dependent = dependent_launch(part)
        options = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}
        self._expand(part, shrunk, groups, groups.num_slots + 1, IS_OWN_PART=True, **options)

    def _expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        groups: TokenGroups,
        num_groups: int,
        **options: Any,
    ) -> None:
        tiles, places = self.tiles, self.blocks.places
        expand_kernel[(num_groups, places.shape[0])](
            shrunk,
            self.b,
            out,
            places,
            groups.order,
            groups.counts,
            self.ranks,
            shrunk.shape[1],
            out.shape[1],
            NUM_PARTS=self.ranks.shape[1],
            MAX_RANK=self.max_rank,
            NUM_SPLITS=shrunk.shape[0],
            BLOCK_TOKENS=tiles.tokens,
            BLOCK_RANK=tiles.rank_block(self.max_rank),
            BLOCK_OUTPUTS=tiles.outputs,
            ALIGNMENT=self.blocks.alignment,
            num_warps=tiles.num_warps,
            # Of one or two turns: buffers for more would only keep it from beside a product.
            num_stages=1,
            **options,
        )
