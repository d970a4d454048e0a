"""Steps that verify drafts as CUDA graphs: one for each of some numbers of rows and tokens a row.

A step replays the smallest graph that holds it. Rows with fewer tokens than the graph has, and rows
that pad it, are filled up with tokens that are nobody's: their keys and values go to the dummy
page, where the table of slots then says they are until the step that brings the position's own
token; no token of a row sees what stands behind it. The two ends of a step are those of decode
graphs, with a row for each token. All tokens are sampled; which of them hold is found out
elsewhere. Knows no proposer and no scheduler.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, StepShape
from workers.graphs.decode_graphs import DrawSamples, GraphCapturer, Replay
from workers.graphs.decode_step import (
    FIRST_CACHE_FIELD,
    SEQ_LENS_FIELD,
    DecodeStepKernels,
    StepRows,
    TokenRows,
)
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.ring import StagingRing, StagingSlot
from workers.models.token_inputs import TokenInputs
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens, SamplingState
from workers.sampling.transfer import upload
from workers.scheduler.plan import NAN_TOKEN, IntArray, StepPlan, StepResult

MAX_VERIFY_TOKENS = 512
MAX_TREE_TOKENS = 1088
"""Of steps with trees: 64 rows of 16 drafts. Making a tree takes more launches than a chain."""
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Fewer than of decode graphs: there is a graph for each of them and each number of tokens."""


def verify_shapes(
    max_rows: int, lengths: Sequence[int], max_tokens: int = MAX_VERIFY_TOKENS
) -> list[StepShape]:
    """To capture, the largest first, for up to max_rows rows with so many tokens each, of which the
    token sampled last is one, max_tokens together."""
    rows = [own for own in _ROWS if own < max_rows] + [max_rows]
    shapes = [
        StepShape(ForwardMode.TARGET_VERIFY, num_rows, num_tokens)
        for num_rows in rows
        for num_tokens in lengths
        if num_rows * num_tokens <= max_tokens
    ]
    return sorted(shapes, key=lambda one: -one.rows * one.tokens_per_row)


def least(sizes: Sequence[int], size: int) -> int | None:
    """The least of sizes, which ascend, that is as large as size; None where none is."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A replayed greedy step: its tokens appear in a staging slot, at places int64 (num tokens of
    the plan,). step: its number there."""

    slot: StagingSlot
    step: int
    places: npt.NDArray[np.int64]

    def read(self) -> StepResult:
        """Raises RuntimeError if the slot is another step's."""
        self.slot.check_answered(self.step)
        return StepResult(token_ids=self.slot.sampled[self.places])


@dataclass(frozen=True, slots=True)
class _VerifyGraph:
    """logits: this rank's, one row a token, valid until the next replay."""

    replay: Replay
    logits: torch.Tensor


class _Replayed(NamedTuple):
    """Of the last replay. places: of the plan's tokens among the graph's."""

    logits: torch.Tensor
    plan: StepPlan
    places: npt.NDArray[np.int64]


class VerifyGraphs:
    """The graphs of one rank. No method waits for the device.

    backend: one that captures_verify, with static buffers for as many rows. shapes: the largest
    first. padding_slot, replayed_s: as of DecodeGraphs.
    """

    replayed_s = float("-inf")

    def __init__(
        self,
        model: GraphedModel,
        backend: GraphAttentionBackend,
        kernels: DecodeStepKernels,
        capturer: GraphCapturer,
        staging: StagingRing,
        shapes: Sequence[StepShape],
        padding_slot: int,
    ) -> None:
        device = backend.config.device
        self._model = model
        self._backend = backend
        self._kernels = kernels
        self._capturer = capturer
        self._staging = staging
        self._padding_slot = padding_slot
        self._rows = sorted({one.rows for one in shapes})
        self._lengths = sorted({one.tokens_per_row for one in shapes})
        max_rows = self._rows[-1]
        self._max_tokens = max_tokens = max(one.rows * one.tokens_per_row for one in shapes)
        num_accounts = len(backend.req_to_token_pool.own_tables)
        self._tokens = StepRows.allocate(max_tokens, device, num_accounts)
        self._token_rows = TokenRows.allocate(max_rows, device)
        self._new_lens = {
            length: torch.full((max_rows,), length, dtype=torch.int32, device=device)
            for length in self._lengths
        }
        self._missing = list(shapes)
        self._graphs: dict[StepShape, _VerifyGraph] = {}
        self._replayed: _Replayed | None = None
        self._last_shape: tuple[StepPlan, StepShape | None] | None = None

    def covers(self, plan: StepPlan) -> bool:
        """Whether a captured graph can run the plan."""
        return self._shape_for(plan) in self._graphs

    def run(self, plan: StepPlan, sampling: SamplingState) -> "VerifiedStep | SampledTokens":
        """Replay a plan that is covered; its admissions and table writes have been applied. Greedy
        tokens come as a VerifiedStep, others as tokens still on the device."""
        slot = self.replay(plan)
        places = self._last_replay().places
        if sampling.is_plainly_greedy(*self._sampled_places(plan)):
            return VerifiedStep(slot, slot.step, places)
        return self.finish(plan, sampling, partial(sampling.sample, drafts=self.run_drafts(plan)))

    def run_drafts(self, plan: StepPlan) -> RunDrafts | None:
        """Of the plan that has just been replayed; None where it has none."""
        return RunDrafts.of(plan) if plan.has_runs else None

    def replay(self, plan: StepPlan) -> StagingSlot:
        """As run, of a plan whose samples are drawn later, by finish."""
        shape = self._shape_for(plan)
        graph = None if shape is None else self._graphs.get(shape)
        if shape is None or graph is None:
            raise RuntimeError("a plan is replayed that no captured graph covers")
        slot, places = self._stage(shape, plan)
        self._before_replay(plan, places)
        graph.replay()
        self.replayed_s = time.perf_counter()
        self._replayed = _Replayed(graph.logits, plan, places)
        slot.mark_used()
        return slot

    def _before_replay(self, plan: StepPlan, places: npt.NDArray[np.int64]) -> None:
        """places: of the plan's tokens among the graph's."""

    def finish(self, plan: StepPlan, sampling: SamplingState, draw: DrawSamples) -> SampledTokens:
        """Tokens of the plan that has just been replayed. The step can be repeated: its plan names
        what it goes on from."""
        return self.sample(plan, sampling, draw)

    def sample(self, plan: StepPlan, sampling: SamplingState, draw: DrawSamples) -> SampledTokens:
        """Tokens of the plan that has just been replayed. Can be repeated."""
        replayed = self._last_replay()
        if replayed.plan is not plan:
            raise RuntimeError("another plan has been replayed")
        (places,) = upload([replayed.places], self._backend.config.device)
        logits = self._model.whole_logits(replayed.logits.index_select(0, places))
        return draw(logits, *self._sampled_places(plan))

    def capture_after(self, plan: StepPlan) -> bool:
        """Capture the graph that the plan, which has just been launched, went without. False where
        there is none for plans like it."""
        shape = self._shape_for(plan)
        if shape is not None and shape in self._missing:
            self.capture(shape)
        return shape is not None

    def capture_next(self) -> bool:
        """Capture the largest missing one; whether there was one."""
        if not self._missing:
            return False
        self.capture(self._missing[0])
        return True

    @torch.inference_mode()
    def capture(self, shape: StepShape) -> None:
        """Capture one of the shapes."""
        self._missing.remove(shape)
        tokens = self._tokens.first(shape.rows * shape.tokens_per_row)
        batch = self._batch(shape, tokens)
        slot, _ = self._stage(shape, None)
        self._staging.point_device_at(slot)
        self._backend.init_forward_metadata_capture_cuda_graph(batch)

        def run() -> torch.Tensor:
            self._kernels.begin(self._staging.ring, tokens)
            self._fill_rows(shape, tokens)
            # As in DecodeGraphs: the embedding lookup waits for all of this.
            self._backend.record_step_tables(batch)
            inputs = TokenInputs(batch.input_ids, batch.positions)
            logits = self._model.local_logits(self._model(inputs, batch).hidden)
            self._kernels.end(logits, tokens.slots, self._staging.ring)
            return logits

        try:
            self._graphs[shape] = _VerifyGraph(*self._capturer.capture(run))
        finally:
            # The trial run took one slot, to its end or not.
            slot.mark_used()
            self._staging.point_device_at_next()

    def _fill_rows(self, shape: StepShape, tokens: StepRows) -> None:
        """Within a graph: what it reads of its rows, from their tokens."""
        self._kernels.gather_rows(
            tokens, self._names_of(tokens), self._token_rows.first(shape.rows)
        )

    def _names_of(self, tokens: StepRows) -> torch.Tensor | None:
        """As named in DecodeStepKernels.gather_rows. Here the host has named all."""
        return None

    @property
    def replayed_places(self) -> npt.NDArray[np.int64]:
        """Where among the graph's tokens those of the last replayed plan stand, int64 (n,)."""
        return self._last_replay().places

    def _sampled_places(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Slot of every token, and the position of what is sampled behind it, int32 (num tokens,)
        both."""
        lens = plan.num_new_tokens
        starts = np.cumsum(lens, dtype=np.int32) - lens
        positions = np.repeat(plan.prefix_lens - starts, lens) + np.arange(len(plan.input_ids))
        return np.repeat(plan.slots, lens), (positions + 1).astype(np.int32)

    def _last_replay(self) -> _Replayed:
        if self._replayed is None:
            raise RuntimeError("no step has been replayed")
        return self._replayed

    def _shape_for(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape that holds the plan; None where there is none. A step asks several
        times."""
        if self._last_shape is None or self._last_shape[0] is not plan:
            self._last_shape = plan, self._find_shape(plan)
        return self._last_shape[1]

    def _find_shape(self, plan: StepPlan) -> StepShape | None:
        if plan.prompt_logprobs or plan.mode is not ForwardMode.TARGET_VERIFY:
            return None
        rows = least(self._rows, plan.batch_size)
        length = least(self._lengths, int(plan.num_new_tokens.max()))
        if rows is None or length is None or rows * length > self._max_tokens:
            return None
        # Tokens that fill a row up see its keys and write to the dummy page, which other rows load:
        # where the token sampled last was no number, neither would they be.
        if (plan.input_ids == NAN_TOKEN).any():
            return None
        # Tokens that fill a row up have places in its slot's table, too.
        if int(plan.prefix_lens.max()) + length > self._backend.config.max_context_len:
            return None
        return StepShape(ForwardMode.TARGET_VERIFY, rows, length)

    def _stage(
        self, shape: StepShape, plan: StepPlan | None
    ) -> tuple[StagingSlot, npt.NDArray[np.int64]]:
        """The plan's tokens, if there is one, and padding up to shape, in host memory; where the
        plan's own stand."""
        slot = self._staging.take()
        rows, num_tokens = slot.rows, shape.rows * shape.tokens_per_row
        num_filled = 0
        places = np.empty(0, dtype=np.int64)
        if plan is not None:
            size = plan.batch_size, shape.tokens_per_row
            columns = np.arange(shape.tokens_per_row, dtype=np.int32)
            num_filled = size[0] * size[1]
            places = (columns < plan.num_new_tokens[:, None]).ravel().nonzero()[0]
            rows[0, :num_filled].reshape(size)[...] = plan.slots[:, None]
            seq_lens = rows[SEQ_LENS_FIELD, :num_filled].reshape(size)
            np.add(plan.prefix_lens[:, None] + np.int32(1), columns, out=seq_lens)
            rows[SEQ_LENS_FIELD + 1 :, :num_filled] = 0
            rows[SEQ_LENS_FIELD + 1, places] = plan.input_ids
            rows[FIRST_CACHE_FIELD, places] = plan.out_cache_loc
        if num_filled < num_tokens:
            rows[0, num_filled:num_tokens] = self._padding_slot
            rows[1:, num_filled:num_tokens] = 0
        return slot, places

    def _batch(self, shape: StepShape, tokens: StepRows) -> ForwardBatch:
        """The batch of a capture. Its host copies are placeholders: a replay reads none."""
        lens_cpu = np.full(shape.rows, shape.tokens_per_row, dtype=np.int32)
        rows = self._token_rows.first(shape.rows)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=shape.rows,
            num_tokens=shape.rows * shape.tokens_per_row,
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            req_pool_indices=rows.slots,
            seq_lens=rows.seq_lens,
            extend_seq_lens=self._new_lens[shape.tokens_per_row][: shape.rows],
            extend_prefix_lens=rows.prefix_lens,
            out_cache_loc=tokens.out_cache_loc,
            seq_lens_cpu=lens_cpu,
            extend_seq_lens_cpu=lens_cpu,
            extend_prefix_lens_cpu=np.zeros_like(lens_cpu),
            attn_backend=self._backend,
            is_captured=True,
            bounded_cache_locs=tokens.bounded_cache_locs,
        )
