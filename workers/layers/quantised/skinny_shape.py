"""Tiles of the kernels for few rows, from a matrix's sizes. Measures nothing."""

from dataclasses import dataclass, replace
from typing import ClassVar

_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """How matrices of any size are multiplied by up to so many rows. block_rows: output features of
    a program; block_tokens: the most rows of x of one. block_k: input features of a turn, at most.
    min_programs: input features are shared out until there are so many. num_stages, num_warps:
    Triton's. min_turns: that a program has at least where input features are shared out."""

    min_turns: ClassVar[int] = 4
    block_rows: int
    block_tokens: int
    block_k: int
    min_programs: int
    num_stages: int
    num_warps: int

    def of(
        self, out_features: int, in_features: int, turn: int, num_rows: int, can_split: bool
    ) -> "SkinnyShape":
        """turn: divides in_features; turns are multiples of it. can_split: whether partial products
        are summed up."""
        block_k = turn
        while 2 * block_k <= self.block_k and in_features % (2 * block_k) == 0:
            block_k *= 2
        num_blocks = -(-out_features // self.block_rows) * -(-num_rows // self.block_tokens)
        num_splits = 1
        while (
            can_split
            and num_splits < _MAX_SPLITS
            and num_blocks * num_splits < self.min_programs
            and in_features % (2 * num_splits * block_k) == 0
            and in_features // (2 * num_splits * block_k) >= self.min_turns
        ):
            num_splits *= 2
        return SkinnyShape(
            self.block_rows,
            self.block_tokens,
            block_k,
            num_splits,
            self.num_stages,
            self.num_warps,
        )


class GemvTiles(SkinnyTiles):
    """The same of one row of x by dot products on CUDA cores; block_rows: of the weight."""

    __slots__ = ()
    min_turns: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class MmaTiles(GemvTiles):
    """The same of weights of four bits, by tensor cores. block_k: a turn for each warp, at most;
    num_warps is read from it. num_stages: turns that a warp holds at once, at most. block_rows: a
    multiple of 16, which all warps have. max_registers: of a thread; None leaves it to the
    compiler. chains: sums that take turns at the products of a half turn, each of which waits for
    the one before it in the same sum."""

    max_registers: int | None = None
    chains: int = 1

    def of(
        self, out_features: int, in_features: int, turn: int, num_rows: int, can_split: bool
    ) -> "SkinnyShape":
        shape = SkinnyTiles.of(self, out_features, in_features, turn, num_rows, can_split)
        return replace(
            shape,
            num_warps=shape.block_k // turn,
            max_registers=self.max_registers,
            chains=self.chains,
        )


class RoundedSkinnyTiles(SkinnyTiles):
    """The same where x is rounded inside the kernel, and tensor cores take weights as they lie.
    block_k is what a scale of x stands for, too; with scales of blocks block_rows divides 128."""

    __slots__ = ()


class MappedSkinnyTiles(RoundedSkinnyTiles):
    """The same with tiles by tensor maps."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """The same of one matrix. num_splits: programs that share input features out. max_registers,
    chains: as MmaTiles."""

    block_rows: int
    block_tokens: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int
    max_registers: int | None = None
    chains: int = 1
