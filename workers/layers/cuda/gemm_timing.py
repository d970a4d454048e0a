"""How long a GEMM takes when it reads weights that are not in the cache. Waits for the device."""

from collections.abc import Callable, Sequence

import torch

_MIN_BYTES = 256 << 20
_MIN_CALLS = 8
_NUM_REPLAYS = 5


def gemm_seconds(
    gemm: Callable[[torch.Tensor], torch.Tensor], weights: Sequence[torch.Tensor]
) -> float:
    """Seconds of one call, from replays of a graph of calls over the weights by turns.

    A graph, because launches from the host take longer than a small GEMM. With enough calls that
    the weights between two uses of one exceed any L2 cache, if there are enough weights.
    """
    num_bytes = weights[0].numel() * weights[0].itemsize
    num_calls = max(_MIN_CALLS, -(-_MIN_BYTES // num_bytes))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gemm(weights[0])
        graph.capture_begin(capture_error_mode="thread_local")
        for call in range(num_calls):
            gemm(weights[call % len(weights)])
        graph.capture_end()
        graph.replay()
        start.record()
        for _ in range(_NUM_REPLAYS):
            graph.replay()
        stop.record()
    stop.synchronize()
    graph.reset()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1e3 / (_NUM_REPLAYS * num_calls)
