"""Tiles of the kernels for few rows, from a matrix's sizes. Measures nothing."""

from dataclasses import dataclass

_MIN_PROGRAMS = 384
"""About three a multiprocessor of an H200: enough reads under way."""
_MAX_SPLITS = 8
_MIN_TURNS = 4


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """block_rows: output features of a program. block_k: input features of a turn. num_splits:
    programs that share input features out. num_stages, num_warps: Triton's."""

    block_rows: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int

    @classmethod
    def of(
        cls, out_features: int, in_features: int, block_k: int, can_split: bool
    ) -> "SkinnyShape":
        """in_features: a multiple of block_k. can_split: whether partial products are summed up."""
        block_rows = 64 if can_split or out_features >= 64 * _MIN_PROGRAMS else 32
        num_blocks, num_splits = -(-out_features // block_rows), 1
        while (
            can_split
            and num_splits < _MAX_SPLITS
            and num_blocks * num_splits < _MIN_PROGRAMS
            and in_features % (2 * num_splits * block_k) == 0
            and in_features // (2 * num_splits * block_k) >= _MIN_TURNS
        ):
            num_splits *= 2
        return cls(block_rows, block_k, num_splits, num_stages=4, num_warps=4)
