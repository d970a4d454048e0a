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
        # Where names of drafts of this shape stand among them, and no others do.
        self._even_names: tuple[torch.Size, torch.Tensor] | None = None
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
        if drafts is not None:
            self._name_evenly(drafts)
            return
        self._named.fill_(_NAMED_BY_THE_HOST)
        self._even_names = None
        if is_full:
            self._named[:num_named].copy_(step.ids)
        else:
            (on_device,) = upload([places], self._named.device)
            self._named.index_copy_(0, on_device, step.ids)

    def _name_evenly(self, drafts: torch.Tensor) -> None:
        """drafts: int64 (bs, n), of rows of as many tokens, which stand one behind the other."""
        if self._even_names is None or self._even_names[0] != drafts.shape:
            self._named.fill_(_NAMED_BY_THE_HOST)
            size = drafts.shape[0], 1 + drafts.shape[1]
            names = self._named[: size[0] * size[1]].view(size)[:, 1:]
            self._even_names = drafts.shape, names
        self._even_names[1].copy_(drafts)

    def _names_of(self, tokens: StepRows) -> torch.Tensor:
        return self._named[: len(tokens.input_ids)]
