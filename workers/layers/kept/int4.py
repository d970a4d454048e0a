"""Integers of four bits with a scale and a zero a group of columns, packed for a kernel's turns."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from workers.layers.kept.weight import KeptWeight

VALUES_PER_WORD = 8
PAIRS_PER_WORD = 4
ROWS_TOGETHER = 8
CHUNK_WORDS = 16
MIDDLE = 8
"""The zero of symmetric weights."""
SCALES_HEADER, HALF_HEADER, FLOAT_HEADER = 1, 2, 4
"""Words of a row's turn: scales of 16 bits where all zeros are MIDDLE, zeros and scales of 16 bits,
zeros and scales of 32."""
_TURNS = (256, 128)
_BITS = 4


class Int4Groups(KeptWeight):
    """(values - zeros) * scales, of columns as `order` has them.

    A row's turn, `turn` columns of it, are turn / 8 words, each of four pairs, one from every
    quarter of the turn: word w has columns 2 * w and 2 * w + 1 of quarter j in the bits from 4 * j
    on and from 4 * j + 16 on, so that one shift and a mask leave neighbours in the two halves.

    words: int32 (out_features / 8, in_features), of eight rows each: the first 16 words of row
    after row, then the next 16 and so on, so that what a warp loads at once, 64 bytes of each of
    eight rows, lies together. headers: int32 (out_features / 8, turns, 8, 1, 2 or 4), of each row's
    turn: the zero of its first half in the low 16 bits of one word and that of its second in the
    high ones, left out where all are MIDDLE; then both halves' scales, as float16 in one word, or,
    where those are not exactly such numbers, as float32 in the third and the fourth. order: int64
    (in_features,), which input feature each column is of; None where they are in order.
    """

    dtypes = (torch.bfloat16, torch.float16)

    def __init__(
        self, words: torch.Tensor, headers: torch.Tensor, order: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = words.shape[0] * ROWS_TOGETHER, words.shape[1]
        self.turn = self.in_features // headers.shape[1]
        self.words, self.headers = nn.Buffer(words), nn.Buffer(headers)
        self.order: nn.Buffer | None = None if order is None else nn.Buffer(order)

    @classmethod
    def of(
        cls, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
    ) -> Self | None:
        """values: int32 (rows, columns) in [0, 16); scales float32, zeros int32 in [0, 16]: (rows,
        groups); groups: int64 (columns,), each column's. None where products have no such sizes."""
        (rows, columns), num_groups = values.shape, scales.shape[1]
        turn = _turn_of(rows, columns, columns // num_groups)
        if turn is None or not _are_even(groups, num_groups):
            return None
        order = groups.argsort(stable=True)
        is_in_order = torch.equal(order, torch.arange(columns, device=order.device))
        packed = _packed(values if is_in_order else values[:, order], turn)
        halves = torch.arange(0, columns, turn // 2, device=zeros.device) * num_groups // columns
        headers = _headers(zeros.to(torch.int32)[:, halves], scales[:, halves])
        return cls(_together(packed, CHUNK_WORDS), headers, None if is_in_order else order)

    @classmethod
    def unread(
        cls,
        rows: int,
        columns: int,
        num_groups: int,
        has_order: bool,
        is_symmetric: bool = False,
    ) -> Self | None:
        """As of, from shapes alone: on the meta device, with scales of 16 bits and, unless
        is_symmetric, zeros."""
        turn = _turn_of(rows, columns, columns // num_groups)
        if turn is None:
            return None
        eights = rows // ROWS_TOGETHER
        words = torch.empty(eights, columns, dtype=torch.int32, device="meta")
        header_words = SCALES_HEADER if is_symmetric else HALF_HEADER
        size = eights, columns // turn, ROWS_TOGETHER, header_words
        headers = torch.empty(size, dtype=torch.int32, device="meta")
        order = torch.empty(columns, dtype=torch.int64, device="meta") if has_order else None
        return cls(words, headers, order)

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self | None:
        first = pieces[0]
        if not all(first._goes_with(piece) for piece in pieces):
            return None
        words = torch.cat([piece.words for piece in pieces])
        widths = {piece.headers.shape[-1] for piece in pieces}
        if len(widths) == 1:
            return cls(words, torch.cat([piece.headers for piece in pieces]), first.order)
        if words.is_meta:
            size = len(words), first.headers.shape[1], ROWS_TOGETHER, max(widths)
            return cls(words, torch.empty(size, dtype=torch.int32, device="meta"), first.order)
        zeros = torch.cat([piece._zeros() for piece in pieces])
        scales = torch.cat([piece._scales() for piece in pieces])
        return cls(words, _headers(zeros, scales), first.order)

    def is_finite(self) -> bool:
        return bool((self._scales() * (1 << _BITS)).isfinite().all())

    def dequantised(self) -> torch.Tensor:
        chunks = self.words.view(len(self.words), -1, ROWS_TOGETHER, CHUNK_WORDS)
        words = chunks.transpose(1, 2).reshape(
            self.out_features, -1, 1, self.turn // VALUES_PER_WORD, 1
        )
        values = words >> pair_shifts(self.words.device) & 0xF
        halves = values.reshape(self.out_features, -1, self.turn // 2)
        matrix = (halves - self._zeros().unsqueeze(2)) * self._scales().unsqueeze(2)
        matrix = matrix.flatten(1)
        if self.order is None:
            return matrix
        return torch.empty_like(matrix).index_copy_(1, self.order, matrix)

    def _zeros(self) -> torch.Tensor:
        """int32 (out_features, halves of turns)."""
        words = self._by_row()[:, :, 0]
        if self.headers.shape[-1] == SCALES_HEADER:
            words = torch.full_like(words, MIDDLE | MIDDLE << 16)
        return torch.stack([words & 0xFFFF, words >> 16], dim=2).flatten(1)

    def _scales(self) -> torch.Tensor:
        """float32 (out_features, halves of turns)."""
        words = self._by_row()
        if words.shape[2] == FLOAT_HEADER:
            return words[:, :, 2:].contiguous().view(torch.float32).flatten(1)
        return words[:, :, -1:].contiguous().view(torch.float16).float().flatten(1)

    def _by_row(self) -> torch.Tensor:
        """(out_features, turns, words of a header)."""
        return self.headers.transpose(1, 2).flatten(0, 1)

    def _goes_with(self, other: Self) -> bool:
        if self.turn != other.turn:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        # From shapes alone: what reads one input was put in order by it.
        return self.order.is_meta or torch.equal(self.order, other.order)


def _turn_of(rows: int, columns: int, group_size: int) -> int | None:
    """The longest whose halves are each of one group, or None."""
    if rows % ROWS_TOGETHER:
        return None
    fitting = (turn for turn in _TURNS if columns % turn == 0 and group_size % (turn // 2) == 0)
    return next(fitting, None)


def _are_even(groups: torch.Tensor, num_groups: int) -> bool:
    """Whether each group has as many columns as any other: a rank's part of columns in an order of
    their own need not."""
    counts = torch.bincount(groups, minlength=num_groups)
    return bool((counts == counts[0]).all())


def _packed(values: torch.Tensor, turn: int) -> torch.Tensor:
    """(rows, columns) -> each row's words, (rows, columns / 8)."""
    words = turn // VALUES_PER_WORD
    by_turn = values.to(torch.int32).view(len(values), -1, PAIRS_PER_WORD, words, 2)
    # No two values have a bit in common, so that their sum is their union, in 32 bits.
    packed = (by_turn << pair_shifts(values.device)).sum((2, 4), dtype=torch.int32)
    return packed.flatten(1)


def _together(words: torch.Tensor, num_words: int) -> torch.Tensor:
    """(rows, n) -> (rows / 8, 8 * n): num_words of each of eight rows, then the next ones."""
    by_row = words.view(-1, ROWS_TOGETHER, words.shape[1] // num_words, num_words)
    return by_row.transpose(1, 2).flatten(1).contiguous()


def _headers(zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Of zeros, int32, and scales, float32, both (rows, halves of turns). As short as can be."""
    low, high = zeros.view(len(zeros), -1, 2).unbind(2)
    half = scales.half()
    if torch.equal(half.float(), scales):
        parts = [half.contiguous().view(torch.int32)]
        if not bool((zeros == MIDDLE).all()):
            parts.insert(0, low | high << 16)
    else:
        first, second = scales.contiguous().view(torch.int32).view(len(zeros), -1, 2).unbind(2)
        parts = [low | high << 16, torch.zeros_like(low), first, second]
    by_row = torch.stack(parts, dim=2)
    together = _together(by_row.flatten(1), len(parts))
    return together.view(len(together), -1, ROWS_TOGETHER, len(parts))


def pair_shifts(device: torch.device) -> torch.Tensor:
    """int32 (4, 1, 2): of each pair's two values in a word."""
    pairs = torch.arange(0, _BITS * PAIRS_PER_WORD, _BITS, dtype=torch.int32, device=device)
    halves = torch.tensor([0, 16], dtype=torch.int32, device=device)
    return pairs.view(-1, 1, 1) + halves
