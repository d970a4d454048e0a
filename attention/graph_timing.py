"""Attention latency inside a CUDA graph: event nodes around each layer, read after a replay.

A timer belongs to one captured graph, an instrumented copy of a plain one; how often that copy is
replayed is the caller's affair. Never waits for the device. Knows no graph and no stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.cuda_timing import EventPair, TimingEvent
from attention.forward_batch import ForwardMode
from attention.roofline import AttentionCost, Lengths, attention_step_cost
from attention.timing import AttentionPhase, AttentionTiming, MeasuredAttention

new_graph_event: Callable[[], TimingEvent] = partial(
    torch.cuda.Event, enable_timing=True, external=True
)
"""External: recorded during a capture it becomes a node, which every replay records anew."""

new_replay_mark: Callable[[], TimingEvent] = torch.cuda.Event


class GraphAttentionTimer(MeasuredAttention):
    """Decode attention of one captured graph, summed over its layers.

    start_recording before each run of the layers (a capture's trial run too), on_replay after each
    replay, take for its timing. What is timed is the call of a layer: a backend that rotates and
    writes K and V in that call is timed with both, and one whose first layer plans for all layers
    with that plan. An event between two kernels also ends their dependent launch, so that a layer
    appears about 2 us longer on an H200 than it is in the plain graph; nothing is subtracted.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        new_event: Callable[[], TimingEvent],
        new_mark: Callable[[], TimingEvent],
    ) -> None:
        super().__init__(backend)
        self._new_event = new_event
        # A capture records the events of its trial run anew: it makes and drops none.
        self._events: list[EventPair] = []
        self._num_recorded = 0
        # Recorded after each replay on its stream: an event node's own state says nothing about
        # whether the node has run since the latest launch of its graph.
        self._mark = new_mark()
        self._pending: AttentionCost | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a replay was not taken yet; another one would overwrite its events."""
        return self._pending is not None

    def start_recording(self) -> None:
        """The layers run from here: whatever an earlier run recorded is void."""
        self._num_recorded = 0

    def on_replay(self, seq_lens: Lengths) -> None:
        """The graph has just been launched over rows of seq_lens, padding rows left out.

        Raises RuntimeError while an earlier replay is pending.
        """
        if self._pending is not None:
            raise RuntimeError("a measured replay follows another one that was not taken")
        new_tokens = np.ones_like(seq_lens)
        self._pending = attention_step_cost(self.backend.config, seq_lens, new_tokens)
        self._mark.record()

    def take(self) -> AttentionTiming | None:
        """The pending replay's timing once the device has passed it, else None. Never waits."""
        cost = self._pending
        if cost is None or not self._mark.query():
            return None
        self._pending = None
        recorded = self._events[: self._num_recorded]
        milliseconds = sum(start.elapsed_time(stop) for start, stop in recorded)
        name = self.backend.name_in(ForwardMode.DECODE)
        return AttentionTiming(
            AttentionPhase.DECODE, name, milliseconds / 1e3, cost.bytes_read, cost.flops
        )

    def _measured(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._num_recorded == len(self._events):
            self._events.append((self._new_event(), self._new_event()))
        start, stop = self._events[self._num_recorded]
        self._num_recorded += 1
        start.record()
        out = attend()
        stop.record()
        return out
