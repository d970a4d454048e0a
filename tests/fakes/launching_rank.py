"""A rank on CPU whose steps are launched by the engine's thread and awaited by events, as on CUDA.

What happens in which order is written down; how long the device takes is not pretended.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.rank_drafts import ReplayingRank, ReplayingRunner
from workers.config import EngineConfig
from workers.runner.cuda_executor import CudaStepExecutor, DeviceClock
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.executor import StepExecutor


class OrderedEvent:
    """A torch.cuda.Event of a device whose work is done at once. log: who has recorded and awaited
    timed ones, which are those around steps, and who has asked for the time between two."""

    def __init__(self, log: list[str], enable_timing: bool = False) -> None:
        self._log, self._is_timed = log, enable_timing

    def record(self) -> None:
        if self._is_timed:
            self._log.append("recorded")

    def synchronize(self) -> None:
        if self._is_timed:
            self._log.append("awaited")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        self._log.append("timed")
        return 1.0


class Launches(TorchDispatchMode):
    """Writes down what would be a launch or a copy on CUDA: operations that are neither views nor
    allocations, by their names. within: of what runs a graph, of which nothing is written."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log
        self._is_within = False

    def within(self, replay: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self._is_within = True
            replay()
            self._is_within = False

        return run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, is_view = func.name().partition(".")[0], func.is_view
        is_launch = not is_view and name not in ("aten::empty", "aten::detach")
        if is_launch and not self._is_within:
            self._log.append(name)
        return func(*args, **(kwargs or {}))


class LaunchingRunner(ReplayingRunner):
    """Drafts are the host's. log: what has happened."""

    launch = CudaModelRunner.launch

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(config)
        self.log: list[str] = []
        monkeypatch.setattr(
            torch.cuda,
            "Event",
            lambda enable_timing=False: OrderedEvent(self.log, enable_timing),
        )
        self._clock = DeviceClock(time.perf_counter)

    def make_executor(self) -> StepExecutor:
        return CudaStepExecutor(self.launch, self._masks, self.prepare_while_idle, self.close)

    def told(self, what: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """own, and a line in the log before each call."""

        def call(*arguments: Any) -> Any:
            self.log.append(what)
            return own(*arguments)

        return call


class LaunchingRank(LaunchingRunner, ReplayingRank):
    """log: what has happened, from watch on."""

    launch = CudaRankDraftsRunner.launch
    with_drafts = CudaRankDraftsRunner.with_drafts

    def watch(self) -> None:
        """From here on, with the graphs that there are by now."""
        drafts, verifies = self._draft_graphs, self._verify_graphs
        assert drafts is not None, "drafts are made in graphs"
        assert verifies is not None, "drafts are verified in graphs"
        for shape, replay in drafts._graphs.items():
            drafts._graphs[shape] = self.told("drafted", replay)
        for shape, graph in verifies._graphs.items():
            verifies._graphs[shape] = replace(graph, replay=self.told("verified", graph.replay))
        drafter, mailbox = self._device_drafter, self._mailbox
        drafter.behind = self.told("behind", drafter.behind)
        mailbox.named = self.told("named", mailbox.named)
        mailbox.send = self.told("sent", mailbox.send)
        if self._ahead is not None:
            self._ahead._send = mailbox.send
        self.log.clear()
