"""When open-loop requests are due: offsets in seconds from the start of the run.

Pure and seeded. An infinite rate makes every request due at once. Knows no clock.
"""

from collections.abc import Iterator

import numpy as np

# Tells the arrivals' random stream from the workload's under one seed.
_STREAM_KEY = 0xA11


def fixed_arrivals(rate_per_s: float) -> Iterator[float]:
    """Evenly spaced, the first one at 0."""
    index = 0
    while True:
        yield index / rate_per_s
        index += 1


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """A Poisson process: independent exponential gaps of mean 1 / rate_per_s."""
    rng = np.random.default_rng([seed, _STREAM_KEY])
    due_s = 0.0
    while True:
        due_s += float(rng.exponential()) / rate_per_s
        yield due_s
