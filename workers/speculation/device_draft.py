"""Drafts by a smaller model on a rank's device. See draft.py, which does the same on the host."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.layers.embedding import likeliest_tokens
from workers.models.base import CausalLM
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import TPGroup
from workers.sampling.transfer import upload
from workers.speculation.device_chain import draft_chains
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.runs import ranges

Argmax = Callable[[torch.Tensor], torch.Tensor]


class DeviceDraftModel:
    """As DeviceDrafter: greedy chains, one pass of the model a draft. All other tokens of a step,
    last drafts included, are read in one pass before the target runs, right or wrong.

    backend: over a pool with the target's cache indices. tp: whose ranks have a part of the model
    each, and draft the same. argmax: logits (n, num_tokens) that a rank has alone -> columns of the
    largest, int64 (n,).
    """

    first_position = 0
    reads_last = True
    reads_target = False

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, tp: TPGroup, argmax: Argmax
    ) -> None:
        self.backend = backend
        self._argmax = argmax
        self._model = model
        self._tp = tp
        self._passes = DevicePasses(backend)

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        return draft_chains(self, self._passes, step)

    def before(self, step: DrafterStep) -> None:
        """Of a run its last draft, of other rows all tokens."""
        plan, runs = step.plan, step.runs
        step.place_tokens()
        num_read = np.zeros_like(plan.num_new_tokens)
        num_read[runs.rows] = runs.num_drafts
        num_new = plan.num_new_tokens - num_read
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        tokens = ranges(starts + num_read, num_new)
        places = plan.out_cache_loc[tokens]
        rows = PassRows(plan.slots, plan.prefix_lens + num_read, num_new, places)
        (own,) = upload([tokens], step.ids.device)
        ids = step.ids.index_select(0, own)
        self.read(ids, self._passes.prepare(rows, ids))

    def behind(self, step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        """It reads tokens only."""

    def behind_decode(self, batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        """Not asked for: it does not read the target."""

    def capture_obstacle(self, max_context_len: int) -> str:
        """As ChainDrafter.capture_obstacle."""
        return self._model.capture_obstacle(max_context_len)

    def carried_to(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Nothing."""
        return slots.new_empty((len(slots), 0))

    def draft(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ChainDrafter.draft."""
        hidden = self._model(TokenInputs(ids, batch.positions), batch).hidden
        local, rows = self._model.local_logits(hidden), self._model.vocab_shard
        if rows is None:
            return self._argmax(local), carried
        return likeliest_tokens(local, rows, self._tp), carried

    def read(self, ids: torch.Tensor, batch: ForwardBatch) -> None:
        """As ChainDrafter.read."""
        nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
        self._model.forward_rows(TokenInputs(ids, batch.positions), batch, nothing)
