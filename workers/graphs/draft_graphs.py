"""A rank's drafts as CUDA graphs: all passes of a drafter in one, for some numbers of rows and
drafts.

A step replays the smallest graph that holds it, if no row computes a prompt. Rows with fewer drafts
than the graph has, and rows that pad it, are filled up with passes that are nobody's: their keys
and values go to the dummy page, or behind a row's own in its last page, where nobody reads them
before they are written anew. Knows no model and no scheduler; how a graph is captured is handed in.
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, StepShape
from workers.graphs.decode_graphs import GraphCapturer, Replay
from workers.graphs.draft_rows import (
    FIRST_PLACES,
    IDS,
    IS_ROW,
    POSITIONS,
    SLOTS,
    DrawnRows,
    RowKernels,
    StaticRows,
)
from workers.graphs.ring import UploadRing
from workers.graphs.verify_graphs import least
from workers.sampling.transfer import upload
from workers.scheduler.plan import NAN_TOKEN, StepPlan
from workers.speculation.ahead import AheadRows
from workers.speculation.config import SpeculativeConfig
from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.policies import draft_lengths

logger = logging.getLogger(__name__)


def draft_graph_lengths(drafter: ChainDrafter, speculation: SpeculativeConfig) -> list[int]:
    """Tokens that a row brings to a step in which the drafter has something to do ahead."""
    lengths = {0, *draft_lengths(speculation)}
    return sorted(1 + own for own in lengths if own or drafter.reads_last)


class DraftGraphs:
    """Of one rank. No method waits for the device.

    drafter: over a backend that can be captured and plans nothing on the host. shapes: as
    verify_shapes gives them, rows and tokens that each brings, of which the first is the one
    sampled last and the others are drafts; the largest first. padding_slot: as of DecodeGraphs.
    kernels: fill the graphs' rows.
    """

    def __init__(
        self,
        drafter: ChainDrafter,
        backend: GraphAttentionBackend,
        capturer: GraphCapturer,
        shapes: Sequence[StepShape],
        padding_slot: int,
        kernels: RowKernels,
    ) -> None:
        self._drafter = drafter
        self._kernels = kernels
        self._backend = backend
        self._capturer = capturer
        self._padding_slot = padding_slot
        self._rows = sorted({one.rows for one in shapes})
        self._lengths = sorted({one.tokens_per_row for one in shapes})
        self._max_tokens = max(one.rows * one.tokens_per_row for one in shapes)
        config = backend.config
        self._static = StaticRows.allocate(self._rows[-1], self._lengths[-1], config.device)
        self._table = backend.req_to_token_pool.req_to_token
        self._missing = list(shapes)
        self.num_shapes = len(shapes)
        self._graphs: dict[StepShape, Replay] = {}
        self._last_shape: tuple[StepPlan, StepShape | None] | None = None
        self._inbox = UploadRing.onto(self._static.staged)
        backend.init_cuda_graph_state(self._rows[-1])

    @property
    def num_captured(self) -> int:
        """Of num_shapes; a capture that failed is not among them."""
        return len(self._graphs)

    @property
    def drafts(self) -> torch.Tensor:
        """Of the last replay, int64 (most rows, most drafts and the token before them)."""
        return self._static.drafts

    def covers(self, plan: StepPlan) -> bool:
        """Whether a captured graph has all that the drafter does ahead of the target's pass."""
        return self._shape_for(plan) in self._graphs

    def covers_ahead(self, ahead: AheadRows) -> bool:
        """Whether a captured graph has as many tokens a row as the plan: what fills rows up writes
        to the dummy page, and these may go on from what is no number."""
        return self._shape_ahead(ahead) is not None

    def run(self, step: DrafterStep) -> DeviceDrafts:
        """Drafts of the step's runs, of a plan that is covered. Where the drafter reads last
        drafts, it has read these, and the tokens of rows without drafts."""
        shape = self._shape_for(step.plan)
        replay = None if shape is None else self._graphs.get(shape)
        if shape is None or replay is None:
            raise RuntimeError("drafts are made by a graph that has not been captured")
        self._stage(shape, step)
        replay()
        return DeviceDrafts(self._of_runs_alone(step))

    def run_ahead(self, ahead: AheadRows, drawn: DrawnRows) -> DeviceDrafts:
        """Drafts of all rows of a plan, covers_ahead, before the host knows its lengths. drawn: of
        the step before."""
        shape = self._shape_ahead(ahead)
        if shape is None:
            raise RuntimeError("drafts are made by a graph that has not been captured")
        staged = self._stage_ahead(shape, ahead)
        self._kernels.go_on(staged, ahead.plan.batch_size, drawn, self._table)
        self._graphs[shape]()
        made = self._static.drafts[: ahead.plan.batch_size, : ahead.tokens_a_row - 1]
        return DeviceDrafts(made.clone(memory_format=torch.contiguous_format))

    def _stage_ahead(self, shape: StepShape, ahead: AheadRows) -> torch.Tensor:
        """As _stage, for GoOn: int64 (4 + tokens a row, rows)."""
        plan, n = ahead.plan, ahead.plan.batch_size
        staged = self._padding(shape)
        staged[SLOTS, :n] = plan.slots
        staged[POSITIONS, :n] = ahead.prefix_lens - np.int32(self._drafter.first_position)
        staged[IS_ROW, :n] = 1
        staged[IDS, :n] = ahead.rows
        staged[FIRST_PLACES:, :n] = plan.out_cache_loc.reshape(n, -1).T
        return self._inbox.send()

    def _padding(self, shape: StepShape) -> npt.NDArray[np.int64]:
        """What is to be sent of rows that are nobody's."""
        staged = self._inbox.take(FIRST_PLACES + shape.tokens_per_row, shape.rows)
        staged[SLOTS] = self._padding_slot
        return staged

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
        self._static.staged.zero_()
        self._static.of_rows(shape.rows)[SLOTS] = self._padding_slot
        batch = self._batch(shape.rows, 0, self._static.passes(1, shape.rows).ids)
        self._backend.init_forward_metadata_capture_cuda_graph(batch)
        self._graphs[shape], _ = self._capturer.capture(lambda: self._passes(shape))
        if self.num_captured == self.num_shapes:
            logger.info("all %d graphs of drafts are captured", self.num_shapes)

    def _passes(self, shape: StepShape) -> torch.Tensor:
        """What a graph holds."""
        n, num_drafts = shape.rows, shape.tokens_per_row - 1
        ids, carried = self._begin(shape)
        drafts = self._static.drafts[:n, :num_drafts]
        made = []
        for column in range(num_drafts):
            batch = self._begin_pass(n, column, ids)
            ids, carried = self._drafter.draft(ids, carried, batch)
            made.append(ids)
        if made:
            torch.stack(made, dim=1, out=drafts)
        if self._drafter.reads_last:
            self._drafter.read(ids, self._begin_pass(n, num_drafts, ids))
        return self._static.drafts

    def _begin(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first pass reads and is handed. All passes' rows are made, and the table learns
        where they write."""
        static, n = self._static, shape.rows
        staged = static.of_rows(n)
        carried = self._drafter.carried_to(staged[SLOTS], staged[POSITIONS])
        passes = static.passes(shape.tokens_per_row, n)
        self._kernels.spread(staged, passes, self._table)
        return passes.ids, carried

    def _begin_pass(self, num_rows: int, column: int, ids: torch.Tensor) -> ForwardBatch:
        batch = self._batch(num_rows, column, ids)
        # As in DecodeGraphs: the lookup of the tokens, an ordinary launch, waits for all of this.
        self._backend.record_step_tables(batch)
        return batch

    def _shape_for(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape that holds the plan; None where there is none. A step asks several
        times."""
        if self._last_shape is None or self._last_shape[0] is not plan:
            self._last_shape = plan, self._find_shape(plan)
        return self._last_shape[1]

    def _shape_ahead(self, ahead: AheadRows) -> StepShape | None:
        shape = self._smallest_shape(ahead.plan)
        is_made = shape in self._graphs and shape.tokens_per_row == ahead.tokens_a_row
        return shape if is_made else None

    def _find_shape(self, plan: StepPlan) -> StepShape | None:
        # What fills a row up writes to the dummy page, which other rows load.
        if not plan.is_decode and (plan.input_ids == NAN_TOKEN).any():
            return None
        return self._smallest_shape(plan)

    def _smallest_shape(self, plan: StepPlan) -> StepShape | None:
        """Whatever its tokens are. Lengths may be upper bounds."""
        mode = plan.mode
        if mode is ForwardMode.EXTEND or plan.has_repeats:
            return None
        # Elsewhere every token is sampled behind.
        if mode is ForwardMode.DECODE and not plan.samples.all():
            return None
        most, first_position = int(plan.num_new_tokens.max()), self._drafter.first_position
        if most == 1 and not self._drafter.reads_last:
            return None
        # A first token may be one that the drafter does not count.
        if int(plan.prefix_lens.min()) < first_position:
            return None
        rows, length = least(self._rows, plan.batch_size), least(self._lengths, most)
        if rows is None or length is None or rows * length > self._max_tokens:
            return None
        # Passes that fill a row up have places in its slot's table, too.
        if int(plan.prefix_lens.max()) + length > self._table.shape[1]:
            return None
        return StepShape(ForwardMode.TARGET_VERIFY, rows, length)

    def _stage(self, shape: StepShape, step: DrafterStep) -> None:
        """The plan's rows, and padding up to shape."""
        plan, n = step.plan, step.plan.batch_size
        staged = self._padding(shape)
        staged[SLOTS, :n] = plan.slots
        np.subtract(plan.prefix_lens, self._drafter.first_position, out=staged[POSITIONS, :n])
        staged[IS_ROW, :n] = 1
        staged[IDS, :n] = plan.input_ids[step.firsts]
        self._place(staged[FIRST_PLACES:, :n], step)
        on_device = self._inbox.send()
        if step.has_unknown:
            # What a slot has sampled last is known to the device alone.
            (tokens,) = upload([step.firsts], on_device.device)
            on_device[IDS, :n].copy_(step.ids.index_select(0, tokens))

    def _place(self, places: npt.NDArray[np.int64], step: DrafterStep) -> None:
        """places: zeros (tokens a row in the graph, bs), to say where each of the step's goes."""
        plan = step.plan
        columns = np.arange(len(places), dtype=np.int32)
        places.T[columns < plan.num_new_tokens[:, None]] = plan.out_cache_loc

    def _batch(self, num_rows: int, column: int, ids: torch.Tensor) -> ForwardBatch:
        """Of the pass that makes a column of drafts. Its host copies are placeholders: a replay
        reads none."""
        static, n = self._static, num_rows
        passes = static.passes(column + 1, n)
        ones = np.ones(n, dtype=np.int32)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=n,
            num_tokens=n,
            input_ids=ids,
            positions=passes.positions[column],
            req_pool_indices=static.of_rows(n)[SLOTS],
            seq_lens=passes.seq_lens[column],
            extend_seq_lens=static.ones[:n],
            extend_prefix_lens=passes.prefix_lens[column],
            out_cache_loc=passes.places[column],
            seq_lens_cpu=ones,
            extend_seq_lens_cpu=ones,
            extend_prefix_lens_cpu=ones,
            attn_backend=self._backend,
            is_captured=True,
        )
