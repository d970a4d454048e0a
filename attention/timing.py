"""Attention latency of a step, by phase: timers that stand between the layers and a backend.

A timer is what a ForwardBatch holds as attn_backend while it is measured. One class per way of
telling time; none of them waits for a device. Knows no metrics registry and no request.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import (
    AttentionDispatch,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
)
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.qkv_projection import QKVProjection
from attention.roofline import AttentionCost, attention_step_cost


class AttentionPhase(StrEnum):
    """What a step's attention was for. A step that mixes prefill and decode rows is EXTEND."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"


def phase_of(mode: ForwardMode) -> AttentionPhase:
    if mode is ForwardMode.TARGET_VERIFY:
        return AttentionPhase.VERIFY
    return AttentionPhase.DECODE if mode.is_decode else AttentionPhase.EXTEND


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Attention of one step, summed over its layers. seconds: between the first kernel's start and
    the last one's end of each layer's call, the KV write included where the call makes it."""

    phase: AttentionPhase
    backend: str
    seconds: float
    bytes_read: int
    flops: int


class MeasuredStep(NamedTuple):
    """A step as it began. backend: the name of what attends in it."""

    phase: AttentionPhase
    backend: str
    cost: AttentionCost


class MeasuredAttention(AttentionDispatch):
    """Passes every call of a layer on to a backend, with a clock around it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    @property
    def backend(self) -> AttentionBackend:
        return self._backend

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """The backend's forward, measured."""
        return self._measured(
            lambda: self._backend.forward(q, k, v, layer, forward_batch, save_kv_cache)
        )

    def fuses_decode_projection(self, num_rows: int) -> bool:
        return self._backend.fuses_decode_projection(num_rows)

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The same for forward_projected: the rotation and the KV write are in it and count."""
        return self._measured(
            lambda: self._backend.forward_projected(projection, layer, forward_batch)
        )

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """The same for forward_latent: what it projects and writes is in it and counts."""
        return self._measured(
            lambda: self._backend.forward_latent(tokens, up, layer, forward_batch)
        )

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The same for forward_cross."""
        return self._measured(lambda: self._backend.forward_cross(q, layer, forward_batch))

    @abstractmethod
    def _measured(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call attend and time it."""


class AttentionTimer(MeasuredAttention):
    """begin_step, any number of forwards, end_step; drain hands out what is known by then.

    A forward outside a step works too, unmeasured. At most MAX_KEPT_STEPS finished steps are kept
    for drain: older ones are dropped, not piled up.
    """

    MAX_KEPT_STEPS = 1024

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend)
        self._timings: deque[AttentionTiming] = deque(maxlen=self.MAX_KEPT_STEPS)
        self._step: MeasuredStep | None = None

    def begin_step(self, forward_batch: ForwardBatch) -> None:
        """Start a step of the batch's phase. RuntimeError when one is open."""
        if self._step is not None:
            raise RuntimeError("begin_step inside a step: end_step is missing")
        cost = attention_step_cost(
            self._backend.config,
            forward_batch.seq_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            forward_batch.encoder_lens_cpu,
        )
        name = self._backend.name_of(forward_batch)
        self._step = MeasuredStep(phase_of(forward_batch.forward_mode), name, cost)

    @abstractmethod
    def end_step(self) -> AttentionTiming | None:
        """Close the step. Its timing where it is already known; drain will have it either way.

        None for a step without any attention, which drain leaves out too.
        """

    def drain(self) -> list[AttentionTiming]:
        """Steps whose time is known and was not drained before, oldest first. Never waits."""
        timings = list(self._timings)
        self._timings.clear()
        return timings

    def _close_step(self) -> MeasuredStep:
        if self._step is None:
            raise RuntimeError("end_step without begin_step")
        step, self._step = self._step, None
        return step

    def _keep(self, step: MeasuredStep, seconds: float) -> AttentionTiming:
        cost = step.cost
        timing = AttentionTiming(step.phase, step.backend, seconds, cost.bytes_read, cost.flops)
        self._timings.append(timing)
        return timing


class UntimedAttention(AttentionTimer):
    """Measures nothing: for who asked for no timing."""

    def _measured(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        return attend()

    def end_step(self) -> AttentionTiming | None:
        self._close_step()
        return None


class CpuAttentionTimer(AttentionTimer):
    """By the host's clock: on a CPU a forward has finished when it returns."""

    def __init__(
        self, backend: AttentionBackend, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(backend)
        self._clock = clock
        self._seconds = 0.0
        self._num_layers = 0

    def _measured(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._step is None:
            return attend()
        start = self._clock()
        out = attend()
        self._seconds += self._clock() - start
        self._num_layers += 1
        return out

    def end_step(self) -> AttentionTiming | None:
        step = self._close_step()
        seconds, num_layers = self._seconds, self._num_layers
        self._seconds, self._num_layers = 0.0, 0
        return self._keep(step, seconds) if num_layers else None
