"""Drafts by a smaller model on a rank's device. See draft.py, which does the same on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from workers.models.base import CausalLM
from workers.models.token_inputs import TokenInputs
from workers.sampling.transfer import upload
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DrafterStep
from workers.speculation.runs import ranges


class DeviceDraftModel:
    """As DeviceDrafter: greedy chains, one pass of the model a draft. All other tokens of a step,
    last drafts included, are read in one pass before the target runs, right or wrong.

    backend: over a pool with the target's cache indices.
    """

    def __init__(self, model: CausalLM, backend: AttentionBackend) -> None:
        self._model = model
        self._passes = DevicePasses(backend)

    @property
    def reads_target(self) -> bool:
        return False

    def propose(self, step: DrafterStep) -> torch.Tensor:
        runs, device = step.runs, step.ids.device
        drafts = torch.zeros(len(runs), runs.width, dtype=torch.int64, device=device)
        (firsts,) = upload([runs.firsts], device)
        before = step.ids.index_select(0, firsts)
        for column in range(runs.width):
            wanting = np.flatnonzero(runs.num_drafts > column)
            (index,) = upload([wanting], device)
            rows = PassRows(
                runs.slots[wanting],
                runs.prefix_lens[wanting] + np.int32(column),
                np.ones(len(wanting), dtype=np.int32),
                step.plan.out_cache_loc[runs.firsts[wanting] + column],
            )
            batch = self._passes.prepare(rows, before.index_select(0, index))
            hidden = self._model(TokenInputs(batch.input_ids, batch.positions), batch).hidden
            likeliest = self._model.compute_logits(hidden).argmax(dim=-1)
            before = before.index_copy(0, index, likeliest)
            drafts[:, column] = before
        return drafts

    def before(self, step: DrafterStep) -> None:
        """Of a run its last draft, of other rows all tokens."""
        plan, runs = step.plan, step.runs
        num_read = np.zeros_like(plan.num_new_tokens)
        num_read[runs.rows] = runs.num_drafts
        num_new = plan.num_new_tokens - num_read
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        tokens = ranges(starts + num_read, num_new)
        rows = PassRows(
            plan.slots, plan.prefix_lens + num_read, num_new, plan.out_cache_loc[tokens]
        )
        own, nothing = upload([tokens, tokens[:0]], step.ids.device)
        batch = self._passes.prepare(rows, step.ids.index_select(0, own))
        # Nobody asks what follows.
        self._model.forward_rows(TokenInputs(batch.input_ids, batch.positions), batch, nothing)

    def behind(self, step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        """It reads tokens only."""
