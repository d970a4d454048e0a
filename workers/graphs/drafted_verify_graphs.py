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
from workers.speculation.device_step import DrafterStep

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
        # Rows and drafts a row that stand there, one row behind the other, and no other names.
        self._named_evenly: torch.Size | None = None
        self._step: DrafterStep | None = None

    def name_tokens(self, step: DrafterStep) -> None:
        """step: which is replayed next, its drafts named."""
        self._step = step

    def run_drafts(self, plan: StepPlan) -> RunDrafts | None:
        named = super().run_drafts(plan)
        if named is None or self._step is None:
            return named
        # All of a step's tokens are sampled behind.
        return DeviceRunDrafts.with_ids(named, self._step.ids)

    def _before_replay(self, plan: StepPlan, places: npt.NDArray[np.int64]) -> None:
        step, num_named = self._step, len(places)
        if step is None:
            raise RuntimeError("a step is replayed whose drafts nobody has named")
        is_full = places[-1] == num_named - 1
        drafts = step.even_drafts if is_full else None
        if drafts is None or drafts.shape != self._named_evenly:
            self._named.fill_(_NAMED_BY_THE_HOST)
        self._named_evenly = None if drafts is None else drafts.shape
        if drafts is not None:
            self._named[:num_named].view(drafts.shape[0], -1)[:, 1:].copy_(drafts)
        elif is_full:
            self._named[:num_named].copy_(step.ids)
        else:
            (on_device,) = upload([places], self._named.device)
            self._named.index_copy_(0, on_device, step.ids)

    def _names_of(self, tokens: StepRows) -> torch.Tensor:
        return self._named[: len(tokens.input_ids)]
