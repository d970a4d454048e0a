"""Where candidates are measured on a rank's own device: scratch pools, stopwatch, graphs."""

import time
from collections.abc import Sequence

import torch

from attention.config import AttentionConfig
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.tuning.candidates import CandidateSet
from attention.tuning.layers import DecodeFront, measured_layers
from attention.tuning.measure import AttentionMeasurement, Run, ScratchSpace, Stopwatch
from attention.tuning.points import StepPoint
from attention.tuning.stopwatch import CudaStopwatch, HostStopwatch
from attention.tuning.tune import PointResult
from workers.config import EngineConfig
from workers.graphs.graph_set import CudaGraphCapturer
from workers.runner.kv_memory import create_kv_pool


class ScratchMeasure:
    """MeasurePoint of an engine. Allocates at the first point that lacks a time.

    front: as HeadLayers. points: those to come.
    """

    def __init__(
        self,
        config: EngineConfig,
        front: DecodeFront | None,
        candidates: CandidateSet,
        measured: AttentionConfig,
        points: Sequence[StepPoint],
    ) -> None:
        self._config = config
        self._front = front
        self._candidates = candidates
        self._measured = measured
        self._points = points
        self._measurement: AttentionMeasurement | None = None

    def __call__(self, point: StepPoint, names: Sequence[str]) -> PointResult:
        if self._measurement is None:
            measured = self._measured
            space = ScratchSpace.over(measured, self._points, make_pool)
            layers = measured_layers(measured, self._front)
            stopwatch = make_stopwatch(measured.device)
            uses_graphs = self._config.enable_cuda_graphs and measured.device.type == "cuda"
            self._measurement = AttentionMeasurement(
                self._candidates, space, layers, stopwatch, uses_graphs
            )
        return self._measurement(point, names)


def make_stopwatch(device: torch.device) -> Stopwatch:
    return (
        make_cuda_stopwatch(device) if device.type == "cuda" else HostStopwatch(time.perf_counter)
    )


def make_cuda_stopwatch(device: torch.device) -> CudaStopwatch:
    capturer = CudaGraphCapturer(device)

    def capture(run: Run) -> Run:
        replay, _ = capturer.capture(run)
        return replay

    return CudaStopwatch(device, capture)


def make_pool(config: AttentionConfig, num_pages: int) -> TokenToKVPool:
    return create_kv_pool(config, (num_pages,), ())
