"""Graphs of steps whose drafts the rank's device has made: the host knows where they stand only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import StepShape
from workers.graphs.decode_graphs import GraphCapturer
from workers.graphs.decode_step import DecodeStepKernels, StepRows
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.ring import StagingRing
from workers.graphs.verify_graphs import VerifyGraphs
from workers.sampling.run_drafts import DeviceRunDrafts, RunDrafts
from workers.sampling.transfer import upload
from workers.scheduler.plan import StepPlan

_NAMED_BY_THE_HOST = -1


class DraftedVerifyGraphs(VerifyGraphs):
    """As VerifyGraphs. Before a replay, name_tokens says what the plan's tokens are."""

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
        # Of a graph's tokens, int64: a token id, or _NAMED_BY_THE_HOST.
        self._named = torch.full_like(self._tokens.input_ids, _NAMED_BY_THE_HOST)
        self._ids: torch.Tensor | None = None

    def name_tokens(self, ids: torch.Tensor) -> None:
        """Of the plan that is replayed next, int64 (num_tokens,) on the device."""
        self._ids = ids

    def run_drafts(self, plan: StepPlan) -> RunDrafts | None:
        named = super().run_drafts(plan)
        if named is None or self._ids is None:
            return named
        # All of a step's tokens are sampled behind.
        return DeviceRunDrafts.with_ids(named, self._ids)

    def _before_replay(self, plan: StepPlan, places: npt.NDArray[np.int64]) -> None:
        if self._ids is None:
            raise RuntimeError("a step is replayed whose drafts nobody has named")
        num_named = len(places)
        self._named[num_named:].fill_(_NAMED_BY_THE_HOST)
        if places[-1] == num_named - 1:
            # No row is filled up.
            self._named[:num_named].copy_(self._ids)
            return
        self._named[:num_named].fill_(_NAMED_BY_THE_HOST)
        (on_device,) = upload([places], self._named.device)
        self._named.index_copy_(0, on_device, self._ids)

    def _name_drafts(self, tokens: StepRows) -> None:
        named = self._named[: len(tokens.input_ids)]
        tokens.input_ids.copy_(torch.where(named >= 0, named, tokens.input_ids))
