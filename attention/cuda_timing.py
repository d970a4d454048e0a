"""Attention latency on a GPU in eager mode: event pairs around each layer, read when they are past.

Inside CUDA graphs events have to be part of the graph: attention.graph_timing. Never waits for the
device: a step's time turns up in a later drain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from attention.backends.base import AttentionBackend
from attention.timing import AttentionTimer, AttentionTiming, MeasuredStep


class TimingEvent(Protocol):
    """What of torch.cuda.Event the timer uses. elapsed_time: milliseconds to the later event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


EventPair = tuple[TimingEvent, TimingEvent]

new_cuda_event: Callable[[], TimingEvent] = partial(torch.cuda.Event, enable_timing=True)


class CudaEventAttentionTimer(AttentionTimer):
    """Events on the current stream. Events are reused once their step has been read."""

    def __init__(self, backend: AttentionBackend, new_event: Callable[[], TimingEvent]) -> None:
        super().__init__(backend)
        self._new_event = new_event
        self._spare: list[EventPair] = []
        self._recorded: list[EventPair] = []
        self._pending: deque[tuple[MeasuredStep, list[EventPair]]] = deque()

    def _measured(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._step is None:
            return attend()
        start, stop = self._spare.pop() if self._spare else (self._new_event(), self._new_event())
        start.record()
        out = attend()
        stop.record()
        self._recorded.append((start, stop))
        return out

    def end_step(self) -> AttentionTiming | None:
        step = self._close_step()
        if self._recorded:
            self._pending.append((step, self._recorded))
            self._recorded = []
        self._read_finished()
        return None

    def drain(self) -> list[AttentionTiming]:
        self._read_finished()
        return super().drain()

    def _read_finished(self) -> None:
        while self._pending:
            step, pairs = self._pending[0]
            if not pairs[-1][1].query():
                return
            self._pending.popleft()
            milliseconds = sum(start.elapsed_time(stop) for start, stop in pairs)
            self._keep(step, milliseconds / 1e3)
            self._spare.extend(pairs)
