"""Decode steps as CUDA graphs: one for each of a ladder of batch sizes, captured while serving.

Where backends take turns by what a step is like, each of them has graphs of its own.
A step of n rows replays the smallest captured size that holds it; rows beyond n are padding: they
have no keys, belong to a slot that no request owns and write to the dummy page. All graphs share
one memory pool and one set of static inputs. A graph holds the whole step: what derives its inputs
and page tables from the host's rows, the model, the sampling of plainly greedy rows. Sizes that
are used a lot get a second graph whose attention is timed, for every Nth replay. What depends on
the device (capturing, launching the step's ends) is handed in. Knows no scheduler.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import AttentionDispatch, ForwardBatch, ForwardMode
from attention.graph_timing import GraphAttentionTimer
from attention.timing import AttentionTiming
from workers.graphs.decode_step import (
    FIRST_CACHE_FIELD,
    SEQ_LENS_FIELD,
    DecodeStepKernels,
    StepRows,
)
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.measured_turns import MeasuredTurns
from workers.graphs.ring import StagingRing, StagingSlot
from workers.models.token_inputs import TokenInputs
from workers.sampling.state import SampledTokens, SamplingState
from workers.scheduler.plan import IntArray, StepPlan, StepResult

Replay = Callable[[], None]
RunStep = Callable[[], torch.Tensor]
DrawSamples = Callable[[torch.Tensor, IntArray, IntArray], SampledTokens]
"""From logits (n, vocab_size) of slots and positions, int32 (n,) each on the host."""


class GraphCapturer(Protocol):
    """Records launches once, to repeat them without the host."""

    def capture(self, run: RunStep) -> tuple[Replay, torch.Tensor]:
        """Warm run up, record it, and return its replay and the tensor that each replay fills.

        Waits for nothing; what run launches before it is recorded takes its turn on the stream.
        """


@dataclass(frozen=True, slots=True)
class GraphedStep:
    """A replayed greedy step: its tokens appear in a staging slot. step: its number there."""

    slot: StagingSlot
    step: int
    num_rows: int

    def read(self) -> StepResult:
        """Raises RuntimeError if the slot is another step's, for the host or for the device."""
        self.slot.check_answered(self.step)
        return StepResult(token_ids=self.slot.sampled[: self.num_rows].copy())


class GraphKey(NamedTuple):
    """Of one captured graph. backend: who attends in it."""

    size: int
    backend: GraphAttentionBackend


@dataclass(frozen=True, slots=True)
class _DecodeGraph:
    """One captured batch size. logits: this rank's, a row each, valid until the next replay."""

    rows: StepRows
    replay: Replay
    logits: torch.Tensor


@dataclass(slots=True)
class _ReplayedRows:
    """Of the last replay, until the next one. rows: static, padding included. plan: whose rows they
    are, in its order."""

    logits: torch.Tensor
    rows: StepRows
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class AttentionTwins:
    """How the attention of graphed steps is timed: which replays, and a new twin's timer."""

    turns: MeasuredTurns[GraphKey]
    new_timer: Callable[[GraphAttentionBackend], GraphAttentionTimer]


def batch_size_ladder(max_batch_size: int) -> list[int]:
    """Sizes to capture, ascending: fine steps where padding costs most, coarse ones further up."""
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_batch_size + 32, 32)]
    sizes = [size for size in ladder if size < max_batch_size]
    return [*sizes, max_batch_size]


def _storing_sizes(backend: GraphAttentionBackend, sizes: Sequence[int]) -> list[int]:
    """Those whose kernels store all rows' keys before any row attends."""
    return [
        size
        for size in sizes
        if not any(one.fuses_decode_projection(size) for one in backend.graph_backends(size))
    ]


def _keys_to_capture(backend: GraphAttentionBackend, sizes: Sequence[int]) -> list[GraphKey]:
    """The last is captured first: the likeliest backend of the largest size."""
    by_size = [[GraphKey(size, one) for one in backend.graph_backends(size)] for size in sizes]
    others = [key for keys in by_size for key in keys[1:]]
    return others + [keys[0] for keys in by_size]


class DecodeGraphs:
    """The graphs of one rank. No method waits for the device.

    padding_slot: the row of the slots' tables that padding rows use. sizes: ascending. replayed_s:
    time.perf_counter() when the last replay had been handed to the device.
    """

    replayed_s = float("-inf")

    def __init__(
        self,
        model: GraphedModel,
        backend: GraphAttentionBackend,
        kernels: DecodeStepKernels,
        capturer: GraphCapturer,
        staging: StagingRing,
        sizes: Sequence[int],
        padding_slot: int,
        twins: AttentionTwins,
    ) -> None:
        device = backend.config.device
        max_rows = sizes[-1]
        self._model = model
        self._backend = backend
        self._kernels = kernels
        self._capturer = capturer
        self._staging = staging
        self._sizes = list(sizes)
        self._storing_sizes = _storing_sizes(backend, sizes)
        self._padding_slot = padding_slot
        num_accounts = len(backend.req_to_token_pool.own_tables)
        self._rows = StepRows.allocate(max_rows, device, num_accounts)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._ones_cpu = np.ones(max_rows, dtype=np.int32)
        self._graphs: dict[GraphKey, _DecodeGraph] = {}
        self._missing = _keys_to_capture(backend, sizes)
        self._twins = twins
        self._timed_graphs: dict[GraphKey, tuple[_DecodeGraph, GraphAttentionTimer]] = {}
        self._pending_timers: list[GraphAttentionTimer] = []
        self._replayed: _ReplayedRows | None = None
        self._last_key: tuple[StepPlan, GraphKey] | None = None
        backend.init_cuda_graph_state(max_rows)

    @property
    def captured_sizes(self) -> list[int]:
        return sorted({key.size for key in self._graphs})

    @property
    def timed_sizes(self) -> list[int]:
        """Sizes that have a twin whose attention is timed."""
        return sorted({key.size for key in self._timed_graphs})

    def covers(self, plan: StepPlan) -> bool:
        """Whether a captured graph can run the plan."""
        return self._is_graphable(plan) and self._captured_key(plan) is not None

    def run(self, plan: StepPlan, sampling: SamplingState) -> "GraphedStep | SampledTokens":
        """Replay a plan that is covered; its admissions and table writes have been applied.

        Plainly greedy steps come back as a GraphedStep, others as tokens still on the device. One
        that raises torch.OutOfMemoryError can be repeated.
        """
        slot = self.replay(plan)
        if sampling.is_plainly_greedy(plan.slots, plan.prefix_lens + plan.num_new_tokens):
            return GraphedStep(slot, slot.step, plan.batch_size)
        return self.finish(plan, sampling, sampling.sample)

    def replay(self, plan: StepPlan) -> StagingSlot:
        """As run, of a plan whose samples are drawn later, by finish."""
        key = self._captured_key(plan)
        if key is None:
            raise RuntimeError("a plan is replayed that no captured graph covers")
        slot = self._stage(plan.batch_size, key.size, plan)
        graph, timer = self._next_graph(key)
        key.backend.before_replay(key.size, slot.rows[SEQ_LENS_FIELD])
        graph.replay()
        self.replayed_s = time.perf_counter()
        self._replayed = _ReplayedRows(graph.logits, graph.rows, plan)
        if timer is not None:
            timer.on_replay(plan.prefix_lens + plan.num_new_tokens)
            self._pending_timers.append(timer)
        slot.mark_used()
        return slot

    def finish(self, plan: StepPlan, sampling: SamplingState, draw: DrawSamples) -> SampledTokens:
        """Tokens of the plan that has just been replayed. The whole step can be repeated where it
        raises torch.OutOfMemoryError."""
        try:
            return self.sample(plan, sampling, draw)
        except torch.OutOfMemoryError:
            # The graph ended with greedy tokens; a repeated step goes on from what it began with.
            rows = self._last_replay().rows.first(plan.batch_size)
            sampling.remember_first(plan.slots, rows.slots, rows.input_ids)
            raise

    def sample(self, plan: StepPlan, sampling: SamplingState, draw: DrawSamples) -> SampledTokens:
        """Tokens of a plan that has just been replayed, or of some of its rows that follow each
        other. Can be repeated."""
        replayed = self._last_replay()
        own = replayed.plan
        is_first = (own.slots == plan.slots[0]) & (own.prefix_lens == plan.prefix_lens[0])
        first = int(np.flatnonzero(is_first)[0])
        rows = slice(first, first + plan.batch_size)
        logits = self._model.whole_logits(replayed.logits[rows])
        sampled = draw(logits, plan.slots, plan.prefix_lens + plan.num_new_tokens)
        sampling.remember_last(plan.slots, replayed.rows.slots[rows], sampled.token_ids)
        return sampled

    def _last_replay(self) -> _ReplayedRows:
        if self._replayed is None:
            raise RuntimeError("no step has been replayed")
        return self._replayed

    def drain_attention(self) -> list[AttentionTiming]:
        """Timings of measured replays that the device has passed, each once. Never waits."""
        if not self._pending_timers:
            return []
        timings = [timing for timer in self._pending_timers if (timing := timer.take())]
        self._pending_timers = [timer for timer in self._pending_timers if timer.is_pending]
        return timings

    def capture_after(self, plan: StepPlan) -> None:
        """Capture at most one graph, behind the plan that has just been launched.

        The size that the plan would have needed, if it decoded without one; beside a prefill,
        which keeps the device busy for longer than a capture takes, what capture_next takes.
        Depends on plans only, so that all ranks of a group capture alike.
        """
        if not plan.is_decode:
            self.capture_next()
        elif self._missing and self._is_graphable(plan) and self._key_for(plan) in self._missing:
            self._capture_key(self._key_for(plan))

    def capture_next(self) -> bool:
        """Capture the largest missing size or else the most wanted twin; whether there was one."""
        if self._missing:
            self._capture_key(self._missing[-1])
            return True
        key = self._twins.turns.most_replayed(self._untimed())
        if key is not None:
            self._capture_twin(key)
        return key is not None

    def _untimed(self) -> list[GraphKey]:
        return [key for key in self._graphs if key not in self._timed_graphs]

    def capture(self, size: int) -> None:
        """Capture one of the sizes, with every backend that has a graph of it."""
        for backend in self._backend.graph_backends(size):
            self._capture_key(GraphKey(size, backend))

    def capture_timed(self, size: int) -> None:
        """Capture the twins of one of the sizes."""
        for backend in self._backend.graph_backends(size):
            self._capture_twin(GraphKey(size, backend))

    def _capture_key(self, key: GraphKey) -> None:
        self._graphs[key] = self._capture(key, key.backend, lambda: None)
        self._missing.remove(key)

    def _capture_twin(self, key: GraphKey) -> None:
        timer = self._twins.new_timer(key.backend)
        self._timed_graphs[key] = self._capture(key, timer, timer.start_recording), timer

    @torch.inference_mode()
    def _capture(
        self, key: GraphKey, attention: AttentionDispatch, on_run: Callable[[], None]
    ) -> _DecodeGraph:
        """on_run: called when the layers are about to run, for the trial and for the record."""
        size, backend = key
        rows = self._rows.first(size)
        batch = self._batch(size, rows, attention)
        slot = self._stage(0, size, None)
        self._staging.point_device_at(slot)
        backend.init_forward_metadata_capture_cuda_graph(batch)

        def run() -> torch.Tensor:
            on_run()
            self._kernels.begin(self._staging.ring, rows)
            # Tables and rows are complete before any kernel of a layer starts, even one launched
            # as a dependent: the embedding lookup in between is an ordinary launch, which waits
            # for all before it. Layers may therefore read them before they wait for anything.
            backend.record_step_tables(batch)
            tokens = TokenInputs(batch.input_ids, batch.positions)
            logits = self._model.local_logits(self._model(tokens, batch).hidden)
            self._kernels.end(logits, rows.slots, self._staging.ring)
            return logits

        try:
            replay, logits = self._capturer.capture(run)
        finally:
            # The trial run took one slot, to its end or not.
            slot.mark_used()
            self._staging.point_device_at_next()
        return _DecodeGraph(rows, replay, logits)

    def _next_graph(self, key: GraphKey) -> tuple[_DecodeGraph, GraphAttentionTimer | None]:
        """The key's graph, or its twin and the twin's timer when its turn has come."""
        if self._twins.turns.take(key):
            timed = self._timed_graphs.get(key)
            if timed is not None and not timed[1].is_pending:
                return timed
        return self._graphs[key], None

    def _is_graphable(self, plan: StepPlan) -> bool:
        sizes = self._sizes_for(plan)
        return (
            plan.is_decode
            and len(sizes) > 0
            and plan.batch_size <= sizes[-1]
            and not plan.prompt_logprobs
            and np.count_nonzero(plan.samples) == plan.batch_size
            # A state is read, so that there must be one.
            and (not self._model.state_entries or bool(plan.prefix_lens.all()))
        )

    def _sizes_for(self, plan: StepPlan) -> list[int]:
        return self._storing_sizes if plan.has_repeats else self._sizes

    def _key_for(self, plan: StepPlan) -> GraphKey:
        """A step asks several times."""
        if self._last_key is None or self._last_key[0] is not plan:
            sizes = self._sizes_for(plan)
            size = sizes[bisect_left(sizes, plan.batch_size)]
            seq_lens = plan.prefix_lens + plan.num_new_tokens
            self._last_key = plan, GraphKey(size, self._backend.graph_backend_of(size, seq_lens))
        return self._last_key[1]

    def _captured_key(self, plan: StepPlan) -> GraphKey | None:
        """The plan's own, or, until that is captured, another backend's of its size."""
        key = self._key_for(plan)
        if key in self._graphs:
            return key
        others = (GraphKey(key.size, other) for other in self._backend.graph_backends(key.size))
        return next((other for other in others if other in self._graphs), None)

    def _stage(self, num_rows: int, size: int, plan: StepPlan | None) -> StagingSlot:
        """The plan's rows, if there are any, and padding up to size, in host memory."""
        slot = self._staging.take()
        rows = slot.rows
        if plan is not None:
            rows[0, :num_rows] = plan.slots
            rows[SEQ_LENS_FIELD, :num_rows] = plan.prefix_lens + 1
            rows[2, :num_rows] = plan.input_ids
            rows[FIRST_CACHE_FIELD, :num_rows] = plan.out_cache_loc
            for account, locs in enumerate(plan.bounded_cache_locs, start=1):
                rows[FIRST_CACHE_FIELD + account, :num_rows] = locs
        if num_rows < size:
            rows[0, num_rows:size] = self._padding_slot
            rows[1:, num_rows:size] = 0
        return slot

    def _batch(self, size: int, rows: StepRows, attention: AttentionDispatch) -> ForwardBatch:
        """The batch of a capture. Its host copies are placeholders: a replay reads none."""
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            num_tokens=size,
            input_ids=rows.input_ids,
            positions=rows.positions,
            req_pool_indices=rows.slots,
            seq_lens=rows.seq_lens,
            extend_seq_lens=self._ones[:size],
            extend_prefix_lens=rows.prefix_lens,
            out_cache_loc=rows.out_cache_loc,
            seq_lens_cpu=self._ones_cpu[:size],
            extend_seq_lens_cpu=self._ones_cpu[:size],
            extend_prefix_lens_cpu=self._ones_cpu[:size],
            attn_backend=attention,
            is_captured=True,
            bounded_cache_locs=rows.bounded_cache_locs,
        )
