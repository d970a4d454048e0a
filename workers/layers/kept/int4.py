"""Integers of four bits with a scale and a zero a group of columns, packed for a kernel's turns."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from workers.layers.kept.weight import KeptWeight

VALUES_PER_WORD = 8
_TURNS = (256, 128)
_BITS = 4


class Int4Groups(KeptWeight):
    """(values - zeros) * scales, of columns as `order` has them.

    words: int32 (out_features, in_features / 8). A turn's columns, `turn` of them, lie in turn / 8
    words: word w has columns w, w + turn / 8, w + 2 * turn / 8 and so on, the lowest bits first, so
    that the values of one shift are of neighbouring columns. scales: float16 or float32 (groups,
    out_features). zeros: uint8, likewise. order: int64 (in_features,), which input feature each
    column is of; None where they are in order.
    """

    dtypes = (torch.bfloat16, torch.float16)

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        order: torch.Tensor | None,
        turn: int,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = words.shape[0], words.shape[1] * VALUES_PER_WORD
        self.turn, self.group_size = turn, self.in_features // scales.shape[0]
        self.words, self.scales, self.zeros = nn.Buffer(words), nn.Buffer(scales), nn.Buffer(zeros)
        self.order: nn.Buffer | None = None if order is None else nn.Buffer(order)

    @classmethod
    def of(
        cls, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
    ) -> Self | None:
        """values: int32 (rows, columns) in [0, 16); scales float32, zeros int32 in [0, 16]: (rows,
        groups); groups: int64 (columns,), each column's. None where products have no such sizes."""
        columns, num_groups = values.shape[1], scales.shape[1]
        turn = _turn_of(columns, columns // num_groups)
        if turn is None or not _are_even(groups, num_groups):
            return None
        order = groups.argsort(stable=True)
        is_in_order = torch.equal(order, torch.arange(columns, device=order.device))
        packed = _packed(values if is_in_order else values[:, order], turn)
        return cls(
            packed,
            _narrow(scales.t().contiguous()),
            zeros.t().to(torch.uint8).contiguous(),
            None if is_in_order else order,
            turn,
        )

    @classmethod
    def unread(cls, rows: int, columns: int, num_groups: int, has_order: bool) -> Self | None:
        """As of, from shapes alone: on the meta device, with scales of 16 bits."""
        turn = _turn_of(columns, columns // num_groups)
        if turn is None:
            return None
        words = torch.empty(rows, columns // VALUES_PER_WORD, dtype=torch.int32, device="meta")
        scales = torch.empty(num_groups, rows, dtype=torch.float16, device="meta")
        order = torch.empty(columns, dtype=torch.int64, device="meta") if has_order else None
        return cls(words, scales, scales.to(torch.uint8), order, turn)

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self | None:
        first = pieces[0]
        if not all(first._goes_with(piece) for piece in pieces):
            return None
        return cls(
            torch.cat([piece.words for piece in pieces]),
            _narrow(torch.cat([piece.scales.float() for piece in pieces], 1)),
            torch.cat([piece.zeros for piece in pieces], 1),
            first.order,
            first.turn,
        )

    def is_finite(self) -> bool:
        return bool((self.scales.float() * (1 << _BITS)).isfinite().all())

    def dequantised(self) -> torch.Tensor:
        shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=self.words.device)
        by_turn = self.words.view(self.out_features, -1, 1, self.turn // VALUES_PER_WORD)
        values = (by_turn >> shifts.view(-1, 1) & 0xF).reshape(self.out_features, -1)
        zeros = self.zeros.t().float().repeat_interleave(self.group_size, 1)
        scales = self.scales.t().float().repeat_interleave(self.group_size, 1)
        matrix = (values - zeros) * scales
        if self.order is None:
            return matrix
        return torch.empty_like(matrix).index_copy_(1, self.order, matrix)

    def _goes_with(self, other: Self) -> bool:
        if (self.group_size, self.turn) != (other.group_size, other.turn):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        # From shapes alone: what reads one input was put in order by it.
        return self.order.is_meta or torch.equal(self.order, other.order)


def _turn_of(columns: int, group_size: int) -> int | None:
    """The longest whose halves are each of one group, or None."""
    fitting = (turn for turn in _TURNS if columns % turn == 0 and group_size % (turn // 2) == 0)
    return next(fitting, None)


def _are_even(groups: torch.Tensor, num_groups: int) -> bool:
    """Whether each group has as many columns as any other: a rank's part of columns in an order of
    their own need not."""
    counts = torch.bincount(groups, minlength=num_groups)
    return bool((counts == counts[0]).all())


def _packed(values: torch.Tensor, turn: int) -> torch.Tensor:
    """(rows, columns) -> words as Int4Groups has them."""
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=values.device)
    by_turn = values.to(torch.int32).view(len(values), -1, VALUES_PER_WORD, turn // VALUES_PER_WORD)
    # No two values have a bit in common, so that their sum is their union, in 32 bits.
    words = (by_turn << shifts.view(-1, 1)).sum(2, dtype=torch.int32)
    return words.flatten(1).contiguous()


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """In 16 bits where they are all exactly numbers of those, which on the meta device all are."""
    half = scales.half()
    return half if scales.is_meta or torch.equal(half.float(), scales) else scales
