"""A rank's drafts as CUDA graphs: all passes of a drafter in one, for some numbers of rows and
drafts.

A step replays the smallest graph that holds it, if no row computes a prompt. Rows with fewer drafts
than the graph has, and rows that pad it, are filled up with passes that are nobody's: their keys
and values go to the dummy page, or behind a row's own in its last page, where nobody reads them
before they are written anew. Knows no model and no scheduler; how a graph is captured is handed in.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, StepShape
from workers.graphs.decode_graphs import GraphCapturer, Replay
from workers.sampling.transfer import upload, upload_into
from workers.scheduler.plan import NAN_TOKEN, StepPlan
from workers.speculation.config import SpeculativeConfig
from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.policies import draft_lengths
from workers.speculation.runs import ranges

logger = logging.getLogger(__name__)

SLOTS, _POSITIONS, _IS_ROW, _IDS, FIRST_PLACES = range(5)
"""Rows of the staged matrix; from the last on the cache index of each of a row's tokens."""


def draft_graph_lengths(drafter: ChainDrafter, speculation: SpeculativeConfig) -> list[int]:
    """Tokens that a row brings to a step in which the drafter has something to do ahead."""
    lengths = {0, *draft_lengths(speculation)}
    return sorted(1 + own for own in lengths if own or drafter.reads_last)


@dataclass(frozen=True, slots=True)
class _StaticRows:
    """What graphs read and write, of up to max_rows rows. staged: int64 ((4 + most tokens of a row)
    * max_rows,), as a step fills it in by one copy, see of_rows. ids, positions, out_cache_loc:
    int64, seq_lens, prefix_lens, is_row: int32 (max_rows,), of the pass under way. carried:
    (max_rows, carried_size). drafts: int64 (max_rows, most drafts)."""

    staged: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    is_row: torch.Tensor
    ones: torch.Tensor
    carried: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        max_tokens: int,
        carried_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "_StaticRows":
        staged = torch.zeros(
            (FIRST_PLACES + max_tokens) * max_rows, dtype=torch.int64, device=device
        )
        ids, positions, places = torch.zeros((3, max_rows), dtype=torch.int64, device=device)
        seq_lens, prefix_lens, is_row = torch.zeros((3, max_rows), dtype=torch.int32, device=device)
        return cls(
            staged,
            ids,
            positions,
            places,
            seq_lens,
            prefix_lens,
            is_row,
            torch.ones(max_rows, dtype=torch.int32, device=device),
            torch.zeros((max_rows, carried_size), dtype=dtype, device=device),
            torch.zeros((max_rows, max_tokens), dtype=torch.int64, device=device),
        )

    def of_rows(self, num_rows: int) -> torch.Tensor:
        """What is staged of so many rows, a view (4 + tokens of a row, num_rows)."""
        num_fields = len(self.staged) // num_rows
        return self.staged[: num_fields * num_rows].view(num_fields, num_rows)


class DraftGraphs:
    """Of one rank. No method waits for the device.

    drafter: over a backend that can be captured and plans nothing on the host. shapes: as
    verify_shapes gives them, rows and tokens that each brings, of which the first is the one
    sampled last and the others are drafts; the largest first. padding_slot: as of DecodeGraphs.
    """

    def __init__(
        self,
        drafter: ChainDrafter,
        backend: GraphAttentionBackend,
        capturer: GraphCapturer,
        shapes: Sequence[StepShape],
        padding_slot: int,
    ) -> None:
        self._drafter = drafter
        self._backend = backend
        self._capturer = capturer
        self._padding_slot = padding_slot
        self._rows = sorted({one.rows for one in shapes})
        self._lengths = sorted({one.tokens_per_row for one in shapes})
        self._max_tokens = max(one.rows * one.tokens_per_row for one in shapes)
        config = backend.config
        self._static = _StaticRows.allocate(
            self._rows[-1], self._lengths[-1], drafter.carried_size, config.dtype, config.device
        )
        self._table = backend.req_to_token_pool.req_to_token
        self._missing = list(shapes)
        self.num_shapes = len(shapes)
        self._graphs: dict[StepShape, Replay] = {}
        self._last_shape: tuple[StepPlan, StepShape | None] | None = None
        backend.init_cuda_graph_state(self._rows[-1])

    @property
    def num_captured(self) -> int:
        """Of num_shapes; a capture that failed is not among them."""
        return len(self._graphs)

    def covers(self, plan: StepPlan) -> bool:
        """Whether a captured graph has all that the drafter does ahead of the target's pass."""
        return self._shape_for(plan) in self._graphs

    def run(self, step: DrafterStep) -> DeviceDrafts:
        """Drafts of the step's runs, of a plan that is covered. Where the drafter reads last
        drafts, it has read these, and the tokens of rows without drafts."""
        shape = self._shape_for(step.plan)
        if shape is None or shape not in self._graphs:
            raise RuntimeError("drafts are made by a graph that has not been captured")
        self._stage(shape, step)
        self._graphs[shape]()
        return DeviceDrafts(self._of_runs_alone(step))

    def _of_runs_alone(self, step: DrafterStep) -> torch.Tensor:
        """A copy of what a replay has left: the next one overwrites that."""
        runs, drafts = step.runs, self._static.drafts[:, : step.runs.width]
        if len(runs) == step.plan.batch_size:
            return drafts[: len(runs)].clone(memory_format=torch.contiguous_format)
        (rows,) = upload([runs.rows], drafts.device)
        return drafts.index_select(0, rows)

    def capture_after(self, plan: StepPlan) -> None:
        """Capture the graph that the plan, which has just been launched, went without, if any."""
        shape = self._shape_for(plan)
        if shape is not None and shape in self._missing:
            self.capture(shape)

    def capture_next(self) -> bool:
        """Capture the largest missing one; whether there was one."""
        if not self._missing:
            return False
        self.capture(self._missing[0])
        return True

    @torch.inference_mode()
    def capture(self, shape: StepShape) -> None:
        """Capture one of the shapes. The trial's rows are all padding."""
        self._missing.remove(shape)
        batch = self._batch(shape.rows)
        self._static.staged.zero_()
        self._static.of_rows(shape.rows)[SLOTS] = self._padding_slot
        self._backend.init_forward_metadata_capture_cuda_graph(batch)
        self._graphs[shape], _ = self._capturer.capture(lambda: self._passes(shape, batch))
        if self.num_captured == self.num_shapes:
            logger.info("all %d graphs of drafts are captured", self.num_shapes)

    def _passes(self, shape: StepShape, batch: ForwardBatch) -> torch.Tensor:
        """What a graph holds."""
        static, n = self._static, shape.rows
        self._begin(shape)
        num_drafts = shape.tokens_per_row - 1
        for column in range(num_drafts):
            self._begin_pass(batch, column)
            ids, carried = self._drafter.draft(batch.input_ids, static.carried[:n], batch)
            static.drafts[:n, column].copy_(ids)
            if column + 1 < num_drafts or self._drafter.reads_last:
                static.ids[:n].copy_(ids)
                static.carried[:n].copy_(carried)
                self._end_pass(n)
        if self._drafter.reads_last:
            self._begin_pass(batch, shape.tokens_per_row - 1)
            self._drafter.read(batch.input_ids, batch)
        return static.drafts

    def _begin(self, shape: StepShape) -> None:
        """Rows as the first pass has them; the table learns where all passes write."""
        static, n = self._static, shape.rows
        staged = static.of_rows(n)
        positions, is_row = staged[_POSITIONS], staged[_IS_ROW]
        static.ids[:n].copy_(staged[_IDS])
        places = positions + self._drafter.first_position
        static.carried[:n].copy_(self._drafter.carried_to(staged[SLOTS], places))
        static.positions[:n].copy_(positions)
        static.is_row[:n].copy_(is_row)
        static.prefix_lens[:n].copy_(positions)
        static.seq_lens[:n].copy_(positions + is_row)
        columns = torch.arange(shape.tokens_per_row, device=positions.device).unsqueeze(1)
        places = staged[FIRST_PLACES : FIRST_PLACES + shape.tokens_per_row]
        slots = staged[SLOTS].expand_as(places)
        self._table[slots, positions + columns] = places.int()

    def _begin_pass(self, batch: ForwardBatch, column: int) -> None:
        n = batch.batch_size
        batch.out_cache_loc.copy_(self._static.of_rows(n)[FIRST_PLACES + column])
        # As in DecodeGraphs: the embedding lookup, an ordinary launch, waits for all of this.
        self._backend.record_step_tables(batch)

    def _end_pass(self, num_rows: int) -> None:
        static, n = self._static, num_rows
        for tensor in (static.positions, static.prefix_lens, static.seq_lens):
            tensor[:n].add_(static.is_row[:n])

    def _shape_for(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape that holds the plan; None where there is none. A step asks several
        times."""
        if self._last_shape is None or self._last_shape[0] is not plan:
            self._last_shape = plan, self._find_shape(plan)
        return self._last_shape[1]

    def _find_shape(self, plan: StepPlan) -> StepShape | None:
        if plan.shape.mode is ForwardMode.EXTEND or plan.has_repeats or not plan.samples.all():
            return None
        rows = next((own for own in self._rows if own >= plan.batch_size), None)
        most, first_position = int(plan.num_new_tokens.max()), self._drafter.first_position
        if most == 1 and not self._drafter.reads_last:
            return None
        # A first token may be one that the drafter does not count.
        if int(plan.prefix_lens.min()) < first_position:
            return None
        length = next((own for own in self._lengths if own >= most), None)
        if rows is None or length is None or rows * length > self._max_tokens:
            return None
        # What fills a row up writes to the dummy page, which other rows load.
        if most > 1 and (plan.input_ids == NAN_TOKEN).any():
            return None
        # Passes that fill a row up have places in its slot's table, too.
        if int(plan.prefix_lens.max()) + length > self._table.shape[1]:
            return None
        return StepShape(ForwardMode.TARGET_VERIFY, rows, length)

    def _stage(self, shape: StepShape, step: DrafterStep) -> None:
        """The plan's rows, and padding up to shape."""
        plan, n = step.plan, step.plan.batch_size
        staged = np.zeros((FIRST_PLACES + shape.tokens_per_row, shape.rows), dtype=np.int64)
        staged[SLOTS] = self._padding_slot
        staged[SLOTS, :n] = plan.slots
        staged[_POSITIONS, :n] = plan.prefix_lens - np.int32(self._drafter.first_position)
        staged[_IS_ROW, :n] = 1
        rows = np.repeat(np.arange(n), plan.num_new_tokens)
        staged[FIRST_PLACES + self._columns(step), rows] = plan.out_cache_loc
        firsts = np.cumsum(plan.num_new_tokens, dtype=np.int64) - plan.num_new_tokens
        ids = staged[_IDS, :n] = plan.input_ids[firsts]
        on_device = self._static.staged[: staged.size]
        upload_into(staged, on_device)
        if (ids < 0).any():
            # What a slot has sampled last is known to the device alone.
            (tokens,) = upload([firsts], on_device.device)
            on_device.view(staged.shape)[_IDS, :n].copy_(step.ids.index_select(0, tokens))

    def _columns(self, step: DrafterStep) -> npt.NDArray[np.int64]:
        """Which of a row's tokens in the graph each of the step's is, int64 (num_tokens,)."""
        return ranges(np.zeros_like(step.plan.num_new_tokens), step.plan.num_new_tokens)

    def _batch(self, num_rows: int) -> ForwardBatch:
        """The batch of a capture. Its host copies are placeholders: a replay reads none."""
        static, n = self._static, num_rows
        ones = np.ones(n, dtype=np.int32)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=n,
            num_tokens=n,
            input_ids=static.ids[:n],
            positions=static.positions[:n],
            req_pool_indices=static.of_rows(n)[SLOTS],
            seq_lens=static.seq_lens[:n],
            extend_seq_lens=static.ones[:n],
            extend_prefix_lens=static.prefix_lens[:n],
            out_cache_loc=static.out_cache_loc[:n],
            seq_lens_cpu=ones,
            extend_seq_lens_cpu=ones,
            extend_prefix_lens_cpu=ones,
            attn_backend=self._backend,
            is_captured=True,
        )
