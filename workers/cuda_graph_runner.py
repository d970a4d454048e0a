"""Decode steps as CUDA graphs: one for each of a ladder of batch sizes, captured while serving.

A step of n rows replays the smallest captured size that holds it; rows beyond n are padding: they
have no keys, belong to a slot that no request owns and write to the dummy page. All graphs share
one memory pool and one set of static inputs. What depends on the device (capturing, launching the
step's ends) is handed in. Knows no scheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode
from workers.decode_step import HOST_ROW_FIELDS, DecodeStepKernels, StepRows
from workers.models.base import CausalLM
from workers.sampling.state import SampledTokens, SamplingState
from workers.scheduler.plan import IntArray, StepPlan, StepResult
from workers.staging import StagingRing, StagingSlot

Replay = Callable[[], None]
RunStep = Callable[[], torch.Tensor]


class GraphCapturer(Protocol):
    """Records launches once, to repeat them without the host."""

    def capture(self, run: RunStep) -> tuple[Replay, torch.Tensor]:
        """Warm run up, record it, and return its replay and the tensor that each replay fills.

        Waits for nothing; what run launches before it is recorded takes its turn on the stream.
        """


@dataclass(frozen=True, slots=True)
class GraphedStep:
    """A replayed greedy step: its tokens are on their way to a staging slot."""

    slot: StagingSlot
    num_rows: int

    def read(self) -> StepResult:
        return StepResult(token_ids=self.slot.sampled[: self.num_rows].copy())


@dataclass(frozen=True, slots=True)
class _DecodeGraph:
    """One captured batch size. logits: (batch size, vocab), valid until the next replay."""

    batch: ForwardBatch
    rows: StepRows
    replay: Replay
    logits: torch.Tensor


def batch_size_ladder(max_batch_size: int) -> list[int]:
    """Sizes to capture, ascending: fine steps where padding costs most, coarse ones further up."""
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_batch_size + 32, 32)]
    sizes = [size for size in ladder if size < max_batch_size]
    return [*sizes, max_batch_size]


class DecodeGraphs:
    """The graphs of one rank. No method waits for the device.

    padding_slot: the row of the slots' tables that padding rows use. sizes: ascending.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: GraphAttentionBackend,
        kernels: DecodeStepKernels,
        capturer: GraphCapturer,
        staging: StagingRing,
        sizes: Sequence[int],
        padding_slot: int,
    ) -> None:
        device = backend.config.device
        max_rows = sizes[-1]
        self._model = model
        self._backend = backend
        self._kernels = kernels
        self._capturer = capturer
        self._staging = staging
        self._sizes = np.array(sizes)
        self._padding_slot = padding_slot
        self._host_rows = torch.zeros((HOST_ROW_FIELDS, max_rows), dtype=torch.int32, device=device)
        self._rows = StepRows.allocate(max_rows, device)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._ones_cpu = np.ones(max_rows, dtype=np.int32)
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[int, _DecodeGraph] = {}
        self._missing = list(sizes)
        backend.init_cuda_graph_state(max_rows)

    @property
    def captured_sizes(self) -> list[int]:
        return sorted(self._graphs)

    def covers(self, plan: StepPlan) -> bool:
        """Whether a captured graph can run the plan."""
        return self._is_graphable(plan) and self._size_for(plan) in self._graphs

    def run(self, plan: StepPlan, sampling: SamplingState) -> "GraphedStep | SampledTokens":
        """Replay a plan that is covered; its admissions and table writes have been applied.

        Plainly greedy steps come back as a GraphedStep, others as tokens still on the device.
        """
        graph = self._graphs[self._size_for(plan)]
        num_rows = plan.batch_size
        slot = self._stage(plan.batch_size, graph.batch.batch_size, plan)
        self._start(graph.batch, graph.rows, slot)
        graph.replay()
        seq_lens = plan.prefix_lens + plan.num_new_tokens
        if sampling.is_plainly_greedy(plan.slots, seq_lens):
            slot.start_download(self._sampled)
            return GraphedStep(slot, num_rows)
        slot.mark_used()
        sampled = sampling.sample(graph.logits[:num_rows], plan.slots, seq_lens)
        sampling.remember(graph.rows.slots[:num_rows], sampled.token_ids)
        return sampled

    def capture_after(self, plan: StepPlan) -> None:
        """Capture at most one missing size, behind the plan that has just been launched.

        The size that the plan would have needed, if it decoded without one; beside a prefill,
        which keeps the device busy for longer than a capture takes, the largest missing one.
        Depends on plans only, so that all ranks of a group capture alike.
        """
        if not self._missing:
            return
        if not plan.is_decode:
            self.capture(self._missing[-1])
        elif self._is_graphable(plan) and self._size_for(plan) in self._missing:
            self.capture(self._size_for(plan))

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture one of the sizes."""
        rows = self._rows.first(size)
        batch = self._batch(size, rows)
        slot = self._stage(0, size, None)
        self._start(batch, rows, slot, is_capture=True)
        slot.mark_used()

        def run() -> torch.Tensor:
            hidden = self._model(batch.input_ids, batch.positions, batch)
            logits = self._model.compute_logits(hidden)
            self._kernels.end(logits, rows.slots, self._sampled[:size])
            return logits

        replay, logits = self._capturer.capture(run)
        self._graphs[size] = _DecodeGraph(batch, rows, replay, logits)
        self._missing.remove(size)

    def _is_graphable(self, plan: StepPlan) -> bool:
        return (
            plan.is_decode
            and plan.batch_size <= self._sizes[-1]
            and not plan.prompt_logprobs
            and bool(plan.samples.all())
        )

    def _size_for(self, plan: StepPlan) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, plan.batch_size)])

    def _stage(self, num_rows: int, size: int, plan: StepPlan | None) -> StagingSlot:
        """The plan's rows, if there are any, and padding up to size, in host memory."""
        slot = self._staging.take()
        rows = slot.rows
        if plan is not None:
            rows[0, :num_rows] = plan.slots
            rows[1, :num_rows] = plan.prefix_lens + 1
            rows[2, :num_rows] = plan.input_ids
            rows[3, :num_rows] = plan.out_cache_loc
        rows[0, num_rows:size] = self._padding_slot
        rows[1:, num_rows:size] = 0
        return slot

    def _start(
        self, batch: ForwardBatch, rows: StepRows, slot: StagingSlot, is_capture: bool = False
    ) -> None:
        """Everything before the model: rows to the device, spread, and the attention metadata."""
        slot.start_upload(self._host_rows)
        self._kernels.begin(self._host_rows, rows)
        seq_lens: IntArray = slot.rows[1, : batch.batch_size]
        batch.seq_lens_cpu = seq_lens
        batch.extend_prefix_lens_cpu = seq_lens - 1
        if is_capture:
            self._backend.init_forward_metadata_capture_cuda_graph(batch)
        else:
            self._backend.init_forward_metadata_replay_cuda_graph(batch)

    def _batch(self, size: int, rows: StepRows) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            num_tokens=size,
            input_ids=rows.input_ids,
            positions=rows.positions,
            req_pool_indices=rows.slots,
            seq_lens=self._host_rows[1, :size],
            extend_seq_lens=self._ones[:size],
            extend_prefix_lens=rows.prefix_lens,
            out_cache_loc=rows.out_cache_loc,
            seq_lens_cpu=self._ones_cpu[:size],
            extend_seq_lens_cpu=self._ones_cpu[:size],
            extend_prefix_lens_cpu=self._ones_cpu[:size],
            attn_backend=self._backend,
        )
