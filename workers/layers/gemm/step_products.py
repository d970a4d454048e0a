"""How long the products of a whole step take, by its number of tokens."""

from collections.abc import Callable, Sequence

import torch

_NUM_TIMED_CALLS = 3


def chain_seconds(chain: Callable[[int], None], num_tokens: Sequence[int]) -> tuple[float, ...]:
    """Seconds of chain(n) for each n, the mean of a few calls after one that does not count.

    chain launches the products of one layer for n tokens on the current stream. Waits for the
    device once, at the end. The largest n goes first: its calls keep the device busy while the host
    launches smaller ones, which alone might take it longer than the device.
    """
    spans = {}
    for n in sorted(num_tokens, reverse=True):
        chain(n)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_NUM_TIMED_CALLS):
            chain(n)
        end.record()
        spans[n] = (start, end)
    torch.cuda.synchronize()
    timed = (spans[n] for n in num_tokens)
    return tuple(start.elapsed_time(end) / 1e3 / _NUM_TIMED_CALLS for start, end in timed)
