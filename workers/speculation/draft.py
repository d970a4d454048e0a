"""Drafts by a smaller model that reads the same tokens.

Its keys and values stand at the target's cache indices, in a pool of its own: pages, prefix hits
and retraction are the target's affair. Of each token that holds they are written in the step in
which the target's are, so that a page that is shared has both. What a wrong draft left is
overwritten before it is read.
"""

from collections.abc import Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from workers.models.base import CausalLM
from workers.models.token_inputs import TokenInputs
from workers.scheduler.plan import AdmittedRequest, IntArray
from workers.speculation.draft_pass import DraftPasses, int64
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.runs import ranges


class DraftModelProposer:
    """Greedy chains, one pass of the model a draft, and one a step for tokens that it has not read.

    On CPU. backend: over a pool with the target's cache indices. table: int32 (num_slots,
    max_context_len), req_to_token, with a place for every position that a row's drafts may take.
    """

    def __init__(
        self,
        history: TokenHistory,
        model: CausalLM,
        backend: AttentionBackend,
        table: torch.Tensor,
    ) -> None:
        self._history = history
        self._model = model
        self._passes = DraftPasses(backend, table)
        # Of the step under way, by slot: tokens behind its prefix that propose has read.
        self._num_read: IntArray = np.zeros(len(table), dtype=np.int32)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Keys and values come with the pages, tokens with the history."""

    @torch.inference_mode()
    def propose(self, rows: DraftRows) -> Drafts:
        """A row reads as many tokens as it drafts: it has no place for more."""
        ids = self._history.token_ids[int64(rows.slots), int64(rows.lens - 1)].long()
        drafts = torch.zeros(len(rows.slots), rows.width, dtype=torch.int64)
        for column in range(rows.width):
            wanting = np.flatnonzero(rows.max_drafts > column)
            index = torch.from_numpy(wanting)
            before = ids[index] if column == 0 else drafts[index, column - 1]
            slots, positions = rows.slots[wanting], rows.lens[wanting] - 1 + np.int32(column)
            batch = self._passes.prepare(
                slots, positions, np.ones(len(wanting), dtype=np.int32), before
            )
            hidden = self._model(TokenInputs(batch.input_ids, batch.positions), batch).hidden
            drafts[index, column] = self._model.compute_logits(hidden).argmax(dim=-1)
        self._num_read[rows.slots] = rows.max_drafts
        return Drafts(drafts, rows.max_drafts)

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        num_held = step.num_held.numpy().astype(np.int32)
        num_read = np.minimum(self._num_read[step.slots], num_held)
        self._num_read[step.slots] = 0
        unread = np.flatnonzero(num_held > num_read)
        if not len(unread):
            return
        slots, num_new = step.slots[unread], (num_held - num_read)[unread]
        starts = (step.prefix_lens + num_read)[unread]
        places = int64(np.repeat(slots, num_new)), torch.from_numpy(ranges(starts, num_new))
        batch = self._passes.prepare(slots, starts, num_new, self._history.token_ids[places].long())
        # Nobody asks what follows.
        nothing = torch.empty(0, dtype=torch.int64)
        self._model.forward_rows(TokenInputs(batch.input_ids, batch.positions), batch, nothing)
