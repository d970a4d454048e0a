"""What a key in the cache adds to the seconds of a step, from steps that differ in nothing else.

Streams grow, and new ones begin short: figures of lengths that are rarely taken were measured with
more keys, or with fewer, than those of the length in use. Least squares through the origin of the
differences from recent steps with as many rows and drafts; older ones fade.
"""

from dataclasses import dataclass

_RECENT = 20
"""Steps whose mean a step is compared with."""
_FADE = 0.998
_MIN_STEPS = 8
_MAX_RISE = 2.0
"""A step that took longer prepared the device, or waited."""
_MIN_DEVIATIONS = 4.0
"""By how many standard deviations of itself a slope differs from none, to be believed."""


@dataclass(slots=True)
class _Recent:
    num_rows: int
    keys: float
    seconds: float
    num_steps: int = 1


class KeySeconds:
    def __init__(self) -> None:
        # By length, and of one number of rows.
        self._recent: dict[int, _Recent] = {}
        self._keys_squared = self._products = self._seconds_squared = self._num_steps = 0.0

    def observe(self, num_rows: int, index: int, num_keys: int, seconds: float) -> None:
        """index: of the length."""
        recent = self._recent.get(index)
        if recent is None or recent.num_rows != num_rows or recent.seconds > _MAX_RISE * seconds:
            self._recent[index] = _Recent(num_rows, num_keys, seconds)
            return
        if seconds > _MAX_RISE * recent.seconds:
            return
        more_keys, more_s = num_keys - recent.keys, seconds - recent.seconds
        recent.num_steps = min(recent.num_steps + 1, _RECENT)
        recent.keys += more_keys / recent.num_steps
        recent.seconds += more_s / recent.num_steps
        if recent.num_steps < _MIN_STEPS:
            return
        self._keys_squared = _FADE * self._keys_squared + more_keys * more_keys
        self._products = _FADE * self._products + more_keys * more_s
        self._seconds_squared = _FADE * self._seconds_squared + more_s * more_s
        self._num_steps = _FADE * self._num_steps + 1.0

    def of_a_key(self) -> float:
        """Seconds; 0 while nothing is known for sure."""
        if self._products <= 0.0 or self._num_steps < _MIN_STEPS:
            return 0.0
        slope = self._products / self._keys_squared
        left = max(self._seconds_squared - slope * self._products, 0.0) / self._num_steps
        is_sure = slope * slope * self._keys_squared > _MIN_DEVIATIONS**2 * left
        return slope if is_sure else 0.0
