"""Seconds of decode steps by rows and draft length, measured, and guessed where nothing was yet."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.speculation.key_seconds import KeySeconds

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Upper bounds of the groups of steps that count as alike."""
_WEIGHT = 0.1
_WEIGHT_OF_SHORTER = 0.5
"""What makes a step longer than others is often nothing of its own."""
_MAX_STRETCH = 1.05
"""Of a mean: a step that took longer than that counts as this. Lengths are often a few per cent
apart, and one late step in fifty is enough to take a worse one for the better."""
_NUM_FIRST = 3
_MAX_RISE = 2.0
_GUESSED_SLOPE = 0.1
"""Of a plain step, what a draft a row adds, before any step with drafts was measured."""
_MAX_DRIFT = 0.2
"""Of the seconds of a key, as they are found anew, before they count."""
_MIN_NET = 0.1
"""Of a step's seconds, what is left of them without its keys at least."""
_MAX_APART = 32.0
"""By which factor what others say of a length may differ from the line through those that were
measured: numbers of rows learn from each other, and could outdo each other without end."""

Seconds = npt.NDArray[np.float64]


class StepSeconds:
    """A table of means over recent steps; 0 where none was measured. With each, how many keys its
    steps read: what these add (KeySeconds) is told apart.

    Of a pair's first steps the shortest counts: a device may prepare itself in one of them, or
    capture a graph. Nor is a single one believed that took longer than expected, nor two that took
    far longer.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: of drafts, ascending, the first is 0."""
        self._lengths = np.array(lengths, dtype=np.float64)
        self._means = np.zeros((len(_ROWS), len(lengths)))
        self._keys = np.zeros_like(self._means)
        self._key_seconds, self._key_s = KeySeconds(), 0.0
        self._shortest = np.full_like(self._means, np.inf)
        self._counts = np.zeros((len(_ROWS), len(lengths)), dtype=np.int64)
        # By group, what the other groups say of it; None where they say nothing.
        self._elsewhere: dict[int, Seconds | None] = {}
        # By group, what was predicted last with steps of its own.
        self._profiles: dict[int, Seconds] = {}

    def add(
        self,
        num_rows: int,
        index: int,
        seconds: float,
        num_keys: int = 0,
        is_at_most: bool = False,
    ) -> None:
        """index: of the length. num_keys: in the cache, of all rows. is_at_most: others of that
        length take no longer, but may take less."""
        group = self._group(num_rows)
        mean, count = float(self._means[group, index]), int(self._counts[group, index])
        if mean:
            net = mean - self._key_s * float(self._keys[group, index])
            mean = max(net, _MIN_NET * mean) + self._key_s * num_keys
        if count < _NUM_FIRST:
            shortest = self._shortest[group, index] = min(self._shortest[group, index], seconds)
            mean = float(shortest) if self._is_credible(num_rows, index, num_keys) else 0.0
        elif not is_at_most or seconds < mean:
            weight = _WEIGHT if seconds > mean else _WEIGHT_OF_SHORTER
            mean += weight * (min(seconds, _MAX_STRETCH * mean) - mean)
        self._counts[group, index] += 1
        self._means[group, index], self._keys[group, index] = mean, num_keys
        kept = self._elsewhere.get(group)
        self._elsewhere = {group: kept} if group in self._elsewhere else {}
        if not is_at_most:
            self._learn_of_keys(num_rows, index, num_keys, seconds)

    def _learn_of_keys(self, num_rows: int, index: int, num_keys: int, seconds: float) -> None:
        self._key_seconds.observe(num_rows, index, num_keys, seconds)
        key_s = min(self._key_seconds.of_a_key(), self._most_of_a_key())
        if abs(key_s - self._key_s) > _MAX_DRIFT * max(key_s, self._key_s):
            self._key_s = key_s
            self._elsewhere, self._profiles = {}, {}

    def _most_of_a_key(self) -> float:
        """Keys take no longer than the steps that read them: figures that were moved to other
        numbers of keys by more would be longer with each step."""
        has_keys = self._keys * self._means > 0.0
        shares = self._means[has_keys] / self._keys[has_keys]
        return float((1.0 - _MIN_NET) * shares.min(initial=np.inf))

    def predict(self, num_rows: int, num_keys: int = 0) -> Seconds | None:
        """Of a step of each length, float64 (num lengths,); None before any is known.

        What was measured with about so many rows counts. Between these lengths, and beyond them,
        seconds are those of other numbers of rows, as much longer or shorter as there.
        """
        net = self._net_of_step(num_rows)
        return None if net is None else net + self._key_s * num_keys

    def _net_of_step(self, num_rows: int) -> Seconds | None:
        """What is predicted of a step that reads no keys."""
        group = self._group(num_rows)
        own = self._own(group)
        known = np.flatnonzero(own)
        if group not in self._elsewhere:
            self._elsewhere[group] = self._by_other_groups(group)
        elsewhere = self._elsewhere[group]
        if elsewhere is None:
            return self._filled(own) if len(known) else None
        if not len(known):
            return elsewhere
        ratios = np.interp(self._lengths, self._lengths[known], own[known] / elsewhere[known])
        line = self._filled(own)
        told = np.clip(elsewhere * ratios, line / _MAX_APART, line * _MAX_APART)
        predicted = self._profiles[group] = np.asarray(told)
        return predicted

    def _own(self, group: int) -> Seconds:
        """What was measured, less its keys' seconds."""
        return self._net(self._means[group], self._keys[group])

    def _net(self, means: Seconds, keys: Seconds) -> Seconds:
        """Something is left of any step."""
        return np.maximum(means - self._key_s * keys, _MIN_NET * means)

    def _is_credible(self, num_rows: int, index: int, num_keys: int) -> bool:
        """Of a pair whose means are being begun."""
        group = self._group(num_rows)
        count, shortest = int(self._counts[group, index]), float(self._shortest[group, index])
        if count == _NUM_FIRST - 1 or self._means[group, index] > 0.0:
            return True
        expected = self.predict(num_rows, num_keys)
        if expected is None:
            return count > 0
        return shortest <= (1.0 if count == 0 else _MAX_RISE) * float(expected[index])

    def are_known(self, num_rows: int) -> npt.NDArray[np.bool_]:
        """Of which lengths steps with about so many rows were measured, bool (num lengths,)."""
        return np.asarray(self._means[self._group(num_rows)] > 0.0)

    def _by_other_groups(self, group: int) -> Seconds | None:
        """Of a group, on the line between its neighbours, of those that steps of several lengths
        were measured of, or else of any."""
        is_known = self._means > 0.0
        is_known[group] = False
        groups = np.flatnonzero(is_known.sum(axis=1) > 1)
        if not len(groups):
            groups = np.flatnonzero(is_known.any(axis=1))
        if not len(groups):
            return None
        behind = int(np.searchsorted(groups, group))
        above = int(groups[min(behind, len(groups) - 1)])
        below = int(groups[behind - 1]) if behind else above
        low, high = self._profile(below), self._profile(above)
        if below == above:
            return _of_fewer_rows(low, min(_ROWS[group] / _ROWS[below], 1.0))
        share = (_ROWS[group] - _ROWS[below]) / (_ROWS[above] - _ROWS[below])
        return np.asarray(low + share * (high - low))

    def _profile(self, group: int) -> Seconds:
        """Of a group with own steps: as predicted last, since the others told more of it then."""
        own = self._own(group)
        told = self._profiles.get(group)
        return self._filled(own) if told is None else np.where(own > 0.0, own, told)

    def _filled(self, means: Seconds) -> Seconds:
        """Where nothing was measured: on the line between its neighbours, and behind the last one
        on from there as steeply as on the way to it. One length was measured at least."""
        lengths = self._lengths
        known = np.flatnonzero(means)
        if len(known) == 1:
            guessed = 1.0 + _GUESSED_SLOPE * lengths
            return np.asarray(guessed * (means[known[0]] / guessed[known[0]]))
        filled = np.interp(lengths, lengths[known], means[known])
        last, before = known[-1], known[-2]
        slope = max((means[last] - means[before]) / (lengths[last] - lengths[before]), 0.0)
        behind = lengths > lengths[last]
        filled[behind] = means[last] + slope * (lengths[behind] - lengths[last])
        return np.asarray(filled)

    @staticmethod
    def _group(num_rows: int) -> int:
        return min(bisect_left(_ROWS, num_rows), len(_ROWS) - 1)


def _of_fewer_rows(seconds: Seconds, share: float) -> Seconds:
    """Of a share of the rows that seconds are of: each draft of a row but the first takes that much
    less. Too little costs one step, too much would not be tried."""
    found = seconds.copy()
    found[2:] = found[1] + share * (seconds[2:] - seconds[1])
    return found
