"""How long a GEMM takes when it reads weights that are not in the cache. Waits for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_MIN_BYTES = 256 << 20
_MIN_CALLS = 8
_MIN_LONG_CALLS = 2
_LONG_CALL_TOKENS = 1024
_MIN_FREE_BYTES = 4 << 30
"""Less, and what torch keeps of ended graphs goes back to the device: a capture cannot do that."""


@dataclass(frozen=True, slots=True)
class Effort:
    """num_replays of a graph; share: of the calls that a careful graph has."""

    num_replays: int
    share: float


CAREFUL = Effort(num_replays=5, share=1.0)
QUICK = Effort(num_replays=1, share=0.5)


def gemm_seconds(
    gemm: Callable[[torch.Tensor], torch.Tensor],
    weights: Sequence[torch.Tensor],
    num_tokens: int,
    effort: Effort,
) -> float:
    """Seconds of one call, from replays of a graph of calls over the weights by turns.

    A graph, because launches from the host take longer than a small GEMM. With enough calls that
    the weights between two uses of one exceed any L2 cache, if there are enough weights; with so
    many tokens that arithmetic is what takes the time, a few calls do.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    num_calls = _num_calls(weights[0], num_tokens, effort)
    if torch.cuda.mem_get_info(weights[0].device)[0] < _MIN_FREE_BYTES:
        torch.cuda.empty_cache()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gemm(weights[0])
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(num_calls):
                gemm(weights[call % len(weights)])
        finally:
            graph.capture_end()
        graph.replay()
        start.record()
        for _ in range(effort.num_replays):
            graph.replay()
        stop.record()
    stop.synchronize()
    graph.reset()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1e3 / (effort.num_replays * num_calls)


def _num_calls(weight: torch.Tensor, num_tokens: int, effort: Effort) -> int:
    if num_tokens >= _LONG_CALL_TOKENS:
        return _MIN_LONG_CALLS
    num_bytes = weight.numel() * weight.itemsize
    return max(_MIN_CALLS, int(effort.share * -(-_MIN_BYTES // num_bytes)))
