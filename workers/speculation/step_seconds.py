"""Seconds of decode steps by rows and draft length, measured, and guessed where nothing was yet."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Upper bounds of the groups of steps that count as alike."""
_WEIGHT = 0.1
_NUM_FIRST = 3
_MAX_RISE = 2.0
_GUESSED_SLOPE = 0.1
"""Of a plain step, what a draft a row adds, before any step with drafts was measured."""

Seconds = npt.NDArray[np.float64]


class StepSeconds:
    """A table of means over recent steps; 0 where none was measured.

    Of a pair's first steps the shortest counts: a device may prepare itself in one of them.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: of drafts, ascending, the first is 0."""
        self._lengths = np.array(lengths, dtype=np.float64)
        self._means = np.zeros((len(_ROWS), len(lengths)))
        self._counts = np.zeros((len(_ROWS), len(lengths)), dtype=np.int64)

    def add(self, num_rows: int, index: int, seconds: float) -> None:
        """index: of the length."""
        group = self._group(num_rows)
        mean, count = float(self._means[group, index]), int(self._counts[group, index])
        self._counts[group, index] += 1
        if count == 0:
            mean = seconds
        elif count < _NUM_FIRST:
            mean = min(mean, seconds)
        else:
            mean += _WEIGHT * (min(seconds, _MAX_RISE * mean) - mean)
        self._means[group, index] = mean

    def predict(self, num_rows: int) -> Seconds | None:
        """Of a step of each length, float64 (num lengths,); None before a plain one was measured
        with about so many rows."""
        group = self._group(num_rows)
        plain_s = self._means[group, 0]
        if plain_s == 0.0:
            return None
        own = self._means[group]
        if (own[1:] > 0.0).any():
            return _filled(self._lengths, own)
        nearest = self._nearest(group)
        if nearest is None:
            return np.asarray(plain_s * (1.0 + _GUESSED_SLOPE * self._lengths))
        there = _filled(self._lengths, self._means[nearest])
        return np.asarray(plain_s * there / there[0])

    def _nearest(self, group: int) -> int | None:
        """The group with steps of several lengths that is most like this one."""
        has_both = (self._means[:, 0] > 0.0) & (self._means[:, 1:] > 0.0).any(axis=1)
        groups = np.flatnonzero(has_both)
        return int(groups[np.abs(groups - group).argmin()]) if len(groups) else None

    @staticmethod
    def _group(num_rows: int) -> int:
        return min(bisect_left(_ROWS, num_rows), len(_ROWS) - 1)


def _filled(lengths: Seconds, means: Seconds) -> Seconds:
    """Where nothing was measured: on the line between its neighbours, and behind the last one on
    from there as steeply as on the way to it. Two lengths are measured at least."""
    known = np.flatnonzero(means)
    filled = np.interp(lengths, lengths[known], means[known])
    last, before = known[-1], known[-2]
    slope = max((means[last] - means[before]) / (lengths[last] - lengths[before]), 0.0)
    behind = lengths > lengths[last]
    filled[behind] = means[last] + slope * (lengths[behind] - lengths[last])
    return np.asarray(filled)
