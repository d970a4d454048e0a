"""Integers of four bits with a scale and a zero a group of columns, packed for a kernel's turns."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from workers.layers.kept.weight import KeptWeight

VALUES_PER_WORD = 8
PAIRS_PER_WORD = 4
_TURNS = (256, 128)
_BITS = 4


class Int4Groups(KeptWeight):
    """(values - zeros) * scales, of columns as `order` has them.

    words: int32 (out_features, in_features / 8). A turn's columns, `turn` of them, lie in turn / 8
    words, each of four pairs, one from every quarter of the turn: word w has columns 2 * w and
    2 * w + 1 of quarter j in the bits from 4 * j on and from 4 * j + 16 on, so that one shift and
    a mask leave neighbours in the two halves. scales: float16 or float32 (groups, out_features).
    zeros: int32 (turns, out_features): that of a turn's first half in the low 16 bits, that of its
    second in the high ones. order: int64 (in_features,), which input feature each column is of;
    None where they are in order.
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
            _zeros_of_turns(zeros, turn, columns),
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
        zeros = torch.empty(columns // turn, rows, dtype=torch.int32, device="meta")
        return cls(words, scales, zeros, order, turn)

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
        by_turn = self.words.view(self.out_features, -1, 1, self.turn // VALUES_PER_WORD, 1)
        values = by_turn >> pair_shifts(self.words.device) & 0xF
        values = values.reshape(self.out_features, -1)
        halves = torch.stack([self.zeros & 0xFFFF, self.zeros >> 16], dim=1).flatten(0, 1)
        zeros = halves.t().float().repeat_interleave(self.turn // 2, 1)
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
    words = turn // VALUES_PER_WORD
    by_turn = values.to(torch.int32).view(len(values), -1, PAIRS_PER_WORD, words, 2)
    # No two values have a bit in common, so that their sum is their union, in 32 bits.
    packed = (by_turn << pair_shifts(values.device)).sum((2, 4), dtype=torch.int32)
    return packed.flatten(1).contiguous()


def _zeros_of_turns(zeros: torch.Tensor, turn: int, columns: int) -> torch.Tensor:
    """zeros: int32 (rows, groups) -> (turns, rows) as Int4Groups has them."""
    group_size = columns // zeros.shape[1]
    halves = torch.arange(0, columns, turn // 2, device=zeros.device) // group_size
    low, high = zeros.t()[halves].to(torch.int32).view(-1, 2, len(zeros)).unbind(1)
    return (low | high << 16).contiguous()


def pair_shifts(device: torch.device) -> torch.Tensor:
    """int32 (4, 1, 2): of each pair's two values in a word."""
    pairs = torch.arange(0, _BITS * PAIRS_PER_WORD, _BITS, dtype=torch.int32, device=device)
    halves = torch.tensor([0, 16], dtype=torch.int32, device=device)
    return pairs.view(-1, 1, 1) + halves


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """In 16 bits where they are all exactly numbers of those, which on the meta device all are."""
    half = scales.half()
    return half if scales.is_meta or torch.equal(half.float(), scales) else scales
