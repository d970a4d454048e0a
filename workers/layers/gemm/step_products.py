"""How long the products of a whole step take, by its number of tokens."""

import random
from collections.abc import Callable, Sequence
from statistics import median

import torch

_NUM_PASSES = 5


def chain_seconds(chain: Callable[[int], None], num_tokens: Sequence[int]) -> tuple[float, ...]:
    """Seconds of chain(n) for each n, the median of a few calls.

    chain launches the products of one layer for n tokens on the current stream. Passes take all n
    in an order of their own: a device lowers its clock once it is warm, and an order by size would
    find the last ones slow. The first pass warms up and does not count. Waits for the device.
    """
    order, rng = list(num_tokens), random.Random(0)
    for n in order:
        chain(n)
    passes = []
    for _ in range(_NUM_PASSES):
        rng.shuffle(order)
        passes.append({n: _timed(chain, n) for n in order})
    torch.cuda.synchronize()
    return tuple(median(spans[n].seconds() for spans in passes) for n in num_tokens)


class _Span:
    """Between two events around what is launched while it is open."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def __enter__(self) -> "_Span":
        self._start.record()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.record()

    def seconds(self) -> float:
        """Once the device has come to its end."""
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1e3


def _timed(chain: Callable[[int], None], n: int) -> _Span:
    with _Span() as span:
        chain(n)
    return span
