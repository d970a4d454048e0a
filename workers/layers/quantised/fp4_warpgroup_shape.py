"""What the products of many tokens and MXFP4 experts are compiled for. Numbers only: no Triton."""

from __future__ import annotations

from typing import NamedTuple


class WarpgroupShape(NamedTuple):
    """width: of the output; depth: columns of x. group: blocks of tokens that take a tile of
    weights one after the other. most_tokens: of a block. num_stages: turns on their way.
    alpha, limit: the gate's, of Gating."""

    depth: int
    width: int
    num_chosen: int
    has_bias: bool
    is_gated: bool
    alpha: float
    limit: float
    group: int
    most_tokens: int
    num_stages: int

    @property
    def num_tiles(self) -> int:
        return -(-self.width // (64 if self.is_gated else 128))

    @property
    def num_rows(self) -> int:
        """Of an expert's weights."""
        return 2 * self.width if self.is_gated else self.width

    @property
    def num_turns(self) -> int:
        return -(-self.depth // 128)

    @property
    def has_last_half(self) -> bool:
        """Whether the last turn has columns in its second half."""
        return self.num_turns * 128 - self.depth < 64
