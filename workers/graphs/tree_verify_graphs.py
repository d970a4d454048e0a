"""Graphs of steps whose drafts are trees, which the rank's device has made.

Tokens of a row are written one behind the other, as a chain's; where they stand in the text, and
whom they see, depends on the drafts that each stands behind. The host knows positions, the device
alone who sees whom: masks are made within the graph. A chain is a tree, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, StepShape
from attention.visibility import Tree
from workers.graphs.decode_graphs import DrawSamples, GraphCapturer
from workers.graphs.decode_step import DecodeStepKernels, StepRows
from workers.graphs.drafted_verify_graphs import DraftedVerifyGraphs
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.ring import StagingRing
from workers.graphs.verify_graphs import VerifiedStep
from workers.sampling.run_drafts import DeviceTreeDrafts, RunDrafts
from workers.sampling.state import SampledTokens, SamplingState
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray, StepPlan
from workers.speculation.step_trees import StepTrees


class TreeVerifyGraphs(DraftedVerifyGraphs):
    """As DraftedVerifyGraphs. Before a replay, name_trees says how the plan's tokens stand, behind
    name_tokens. Samples of a step with trees stay on the device: sampled has them."""

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
        super().__init__(model, backend, kernels, capturer, staging, shapes, padding_slot)
        device, max_tokens = backend.config.device, len(self._tokens.input_ids)
        self._trees: StepTrees | None = None
        # Of a graph's tokens: which of them each stands behind, a root and padding itself.
        self._itself = torch.arange(max_tokens, device=device)
        self._parents = self._itself.clone()
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        max_cells = max(one.rows * one.tokens_per_row**2 for one in shapes)
        self._cells = torch.zeros(max_cells, dtype=torch.bool, device=device)
        rows = torch.arange(self._rows[-1], dtype=torch.int32, device=device)
        self._starts = {length: rows * length**2 for length in self._lengths}
        self._sampled: torch.Tensor | None = None

    def name_trees(self, trees: StepTrees | None) -> None:
        """Of the plan that is replayed next; None where its drafts stand one behind the other."""
        self._trees = trees

    @property
    def sampled(self) -> torch.Tensor:
        """What was drawn behind each token of the last replayed plan with trees, int32 or int64
        (num_tokens,)."""
        if self._sampled is None:
            raise RuntimeError("nothing has been drawn of the step that was replayed last")
        return self._sampled

    def run(self, plan: StepPlan, sampling: SamplingState) -> VerifiedStep | SampledTokens:
        if self._trees is None:
            return super().run(plan, sampling)
        slot, places = self.replay(plan), self.replayed_places
        is_dense = places[-1] == len(places) - 1
        if is_dense and sampling.is_plainly_greedy(*self._sampled_places(plan)):
            # The device reads them in the host's memory, where the graph has written them.
            self._sampled = slot.device_sampled[: len(places)]
            return VerifiedStep(slot, slot.step, places)
        return self.finish(plan, sampling, partial(sampling.sample, drafts=self.run_drafts(plan)))

    def sample(self, plan: StepPlan, sampling: SamplingState, draw: DrawSamples) -> SampledTokens:
        sampled = super().sample(plan, sampling, draw)
        self._sampled = sampled.token_ids
        return sampled

    def run_drafts(self, plan: StepPlan) -> RunDrafts | None:
        if self._trees is None or self._step is None:
            return super().run_drafts(plan)
        drafts = RunDrafts.of(plan, self._trees.shape)
        return DeviceTreeDrafts.of_trees(drafts, self._step.ids, self._trees.parents)

    def capture(self, shape: StepShape) -> None:
        """The trial's tokens are all padding."""
        self._parents.copy_(self._itself)
        super().capture(shape)

    def _sampled_places(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        slots, positions = super()._sampled_places(plan)
        return slots, positions if self._trees is None else self._trees.shape.positions + np.int32(
            1
        )

    def _before_replay(self, plan: StepPlan, places: npt.NDArray[np.int64]) -> None:
        super()._before_replay(plan, places)
        self._sampled = None
        if self._trees is None:
            lens = plan.num_new_tokens
            is_first = np.zeros(len(places), dtype=np.bool_)
            is_first[np.cumsum(lens) - lens] = True
            behind = np.where(is_first, places, places - 1)
            on_device, parents, positions = upload(
                [places, behind, (self._sampled_places(plan)[1] - 1).astype(np.int64)],
                self._parents.device,
            )
        else:
            on_device, positions = upload(
                [places, self._trees.shape.positions.astype(np.int64)], self._parents.device
            )
            parents = on_device.index_select(0, self._trees.parents)
        self._parents.copy_(self._itself)
        self._parents.index_copy_(0, on_device, parents)
        self._positions.zero_()
        self._positions.index_copy_(0, on_device, positions)

    def _fill_rows(self, shape: StepShape, tokens: StepRows) -> None:
        super()._fill_rows(shape, tokens)
        length, n = shape.tokens_per_row, shape.rows * shape.tokens_per_row
        self._kernels.mark_ancestors(self._parents[:n], length, self._cells[: n * length])

    def _batch(self, shape: StepShape, tokens: StepRows) -> ForwardBatch:
        """All tensors outlive the capture: a replay reads them."""
        cells = self._cells[: shape.rows * shape.tokens_per_row**2]
        visibility = Tree(cells, self._starts[shape.tokens_per_row][: shape.rows])
        positions = self._positions[: shape.rows * shape.tokens_per_row]
        return replace(super()._batch(shape, tokens), positions=positions, visibility=visibility)
