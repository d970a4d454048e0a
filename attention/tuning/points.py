"""Steps as far as the time of their attention depends on them: what is measured and looked up.

Host numbers only. Knows no backend.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from attention.forward_batch import ForwardMode
from attention.timing import AttentionPhase, phase_of

Lengths = npt.NDArray[np.int32]

MIN_UNEVEN_ROWS = 8
UNEVEN_RATIO = 2.5
"""The longest row of a decode step to the mean: beyond, kernels that cut rows alike fall behind."""
_UNEVEN_SPAN = 64.0
"""The longest row to the shortest where rows of unlike lengths are measured."""

_ROWS = (1, 4, 16, 64, 256)
# Where rows are cut into as many chunks as a GPU runs at once, one row more can need a second
# turn of all: from 8 to 48 rows backends change places from one count to the next.
_DECODE_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
# Half a block of 64 keys short of round numbers: a key more than those is the worst case of kernels
# that cut keys at round places, and not what lengths are like.
_DECODE_PREFIXES = (224, 480, 992, 2016, 4064, 8160, 16352, 32736, 65504)
_LEAST_STEP = 1.05
"""Between two lengths: a context of 32,768 has no further point behind 32,736."""
_UNLIKE_ROWS = (8, 16, 24, 32, 64, 128, 256)
_UNLIKE_PREFIXES = (992, 4064)
_NEW_TOKENS = (8, 32, 96, 256, 768, 2048, 8192)
_EXTEND_PREFIXES = (0, 992, 4064, 32736)
_VERIFY_TOKENS = (4, 8)
# Beside one prompt, backends change places within a factor of two, and where they begin to cut
# such steps in two.
_MIXED_ROWS = (16, 32, 64, 128, 256)
_MIXED_NEW_TOKENS = (8, 12, 16, 32, 64)
_MIXED_PREFIXES = (224, 992, 4064)


@dataclass(frozen=True, slots=True, order=True)
class StepPoint:
    """rows of new_tokens each on top of prefix_tokens, both means of the rows.

    is_uneven: of decode steps, lengths differ widely; of others, one prompt comes beside rows that
    decode.
    """

    phase: AttentionPhase
    rows: int
    new_tokens: int
    prefix_tokens: int
    is_uneven: bool = False

    @property
    def num_keys(self) -> int:
        return self.rows * (self.prefix_tokens + self.new_tokens)

    def __str__(self) -> str:
        if self.phase is AttentionPhase.DECODE:
            lengths = "unlike lengths, mean " if self.is_uneven else ""
            return f"decode {self.rows} x {lengths}{self.prefix_tokens + 1}"
        beside = ", one prompt beside decoding rows" if self.is_uneven else ""
        text = f"{self.phase} {self.rows} x {self.new_tokens} on {self.prefix_tokens}"
        return text + beside

    def lengths(self) -> tuple[Lengths, Lengths]:
        """Of such a step's rows: keys, those of new tokens included, and new tokens."""
        new = np.full(self.rows, self.new_tokens, dtype=np.int32)
        prefix = np.full(self.rows, self.prefix_tokens, dtype=np.int32)
        if self.is_uneven and self.phase is AttentionPhase.DECODE:
            shares = np.geomspace(1.0, _UNEVEN_SPAN, self.rows)
            prefix = np.maximum(1, shares * (self.prefix_tokens / shares.mean())).astype(np.int32)
        elif self.is_uneven:
            new = np.ones(self.rows, dtype=np.int32)
            new[-1] = self.rows * self.new_tokens - (self.rows - 1)
            prefix[-1] = 0
        return prefix + new, new


def point_of(mode: ForwardMode, seq_lens: Lengths, new_tokens: Lengths) -> StepPoint:
    """Of a step, from the host's copies of its rows' lengths, int32 (bs,)."""
    phase, rows = phase_of(mode), max(1, len(seq_lens))
    if phase is AttentionPhase.DECODE:
        return decode_point(seq_lens)
    num_new = int(new_tokens.sum())
    mean_prefix = (int(seq_lens.sum()) - num_new) / rows
    mean_new = num_new / rows
    is_uneven = rows >= MIN_UNEVEN_ROWS and int(new_tokens.max()) > UNEVEN_RATIO * mean_new
    return StepPoint(phase, rows, max(1, round(mean_new)), round(mean_prefix), is_uneven)


def decode_point(seq_lens: Lengths) -> StepPoint:
    """Of a step whose rows bring a token each: as point_of."""
    rows = max(1, len(seq_lens))
    mean = int(seq_lens.sum()) / rows
    is_uneven = rows >= MIN_UNEVEN_ROWS and int(seq_lens.max()) > UNEVEN_RATIO * mean
    return StepPoint(AttentionPhase.DECODE, rows, 1, max(0, round(mean - 1.0)), is_uneven)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step of an engine exceeds. max_keys: of all rows of a step, as far as they are
    measured. has_verify: whether drafts are verified."""

    max_rows: int
    max_step_tokens: int
    max_context_len: int
    max_keys: int
    has_verify: bool = False

    def allow(self, point: StepPoint) -> bool:
        seq_lens, new = point.lengths()
        return (
            int(new.sum()) <= self.max_step_tokens
            and int(seq_lens.max()) <= self.max_context_len
            and int(seq_lens.sum()) <= self.max_keys
        )


def points_to_measure(limits: StepLimits) -> list[StepPoint]:
    """All within the limits, phases by turns and coarse steps first: time may run out."""
    by_phase = [_decode_points(limits), _extend_points(limits)]
    if limits.has_verify:
        by_phase.append(_verify_points(limits))
    allowed = [[point for point in points if limits.allow(point)] for points in by_phase]
    turns = itertools.zip_longest(*map(_coarse_first, allowed))
    return [point for turn in turns for point in turn if point is not None]


def _decode_points(limits: StepLimits) -> list[StepPoint]:
    rows = _up_to(_DECODE_ROWS, limits.max_rows)
    prefixes = _up_to(_DECODE_PREFIXES, limits.max_context_len - 1, _LEAST_STEP)
    points = [StepPoint(AttentionPhase.DECODE, n, 1, keys) for n in rows for keys in prefixes]
    unlike = (n for n in _up_to(_UNLIKE_ROWS, limits.max_rows) if n >= MIN_UNEVEN_ROWS)
    points += [
        StepPoint(AttentionPhase.DECODE, n, 1, keys, is_uneven=True)
        for n, keys in itertools.product(unlike, _UNLIKE_PREFIXES)
    ]
    return points


def _extend_points(limits: StepLimits) -> list[StepPoint]:
    rows = _up_to(_ROWS, limits.max_rows)
    new_tokens = _up_to(_NEW_TOKENS, min(limits.max_step_tokens, limits.max_context_len))
    grid = itertools.product(rows, new_tokens, _EXTEND_PREFIXES)
    points = [StepPoint(AttentionPhase.EXTEND, *place) for place in grid]
    mixed = (n for n in _up_to(_MIXED_ROWS, limits.max_rows) if n >= MIN_UNEVEN_ROWS)
    places = itertools.product(mixed, _MIXED_NEW_TOKENS, _MIXED_PREFIXES)
    return points + [StepPoint(AttentionPhase.EXTEND, *place, True) for place in places]


def _verify_points(limits: StepLimits) -> list[StepPoint]:
    rows = _up_to(_ROWS, limits.max_rows)
    grid = itertools.product(rows, _VERIFY_TOKENS, _DECODE_PREFIXES)
    return [StepPoint(AttentionPhase.VERIFY, *place) for place in grid]


def points_between(points: Iterable[StepPoint]) -> Iterator[StepPoint]:
    """A grid of the points' places and one between each two of them, for each kind of points."""
    kinds: dict[tuple[AttentionPhase, bool], list[StepPoint]] = {}
    for point in points:
        kinds.setdefault((point.phase, point.is_uneven), []).append(point)
    for (phase, is_uneven), own in kinds.items():
        axes = [_doubled(axis) for axis in zip(*map(_place, own), strict=True)]
        for rows, new_tokens, prefix in itertools.product(*axes):
            yield StepPoint(phase, rows, new_tokens, prefix, is_uneven)


def _doubled(axis: Iterable[int]) -> list[int]:
    """With the geometric mean of each two neighbours."""
    known = sorted(set(axis))
    between = (round(math.sqrt((low + 1) * (high + 1))) - 1 for low, high in pairwise(known))
    return sorted({*known, *between})


def _up_to(values: Sequence[int], most: int, least_step: float = 1.0) -> list[int]:
    """Those below most, and most itself where it is no more than the last of them, and by
    least_step the longest."""
    below = [value for value in values if value < most]
    is_apart = not below or most > least_step * below[-1]
    return [*below, *([most] if most <= values[-1] and is_apart else [])]


def _coarse_first(points: Iterable[StepPoint]) -> list[StepPoint]:
    """Every other place of each axis before those between; places that are alike do not follow each
    other, so that the first ones say something of all."""
    found = list(points)
    random.Random(0).shuffle(found)
    axes = [sorted(set(axis)) for axis in zip(*map(_place, found), strict=True)]

    def num_between(point: StepPoint) -> int:
        return sum(axis.index(at) % 2 for axis, at in zip(axes, _place(point), strict=True))

    return sorted(found, key=num_between)


def _place(point: StepPoint) -> tuple[int, int, int]:
    return point.rows, point.new_tokens, point.prefix_tokens
