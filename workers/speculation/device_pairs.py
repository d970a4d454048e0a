"""Drafts by a head on a rank's device. See pairs.py, which does the same on the host."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.sampling.transfer import upload
from workers.speculation.device_chain import draft_chains
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.pairs import FIRST_PAIR, PairHead
from workers.speculation.runs import ranges


class DevicePairs:
    """As DeviceDrafter: greedy chains, one pass of the head a draft. Behind the target's pass the
    pairs of all tokens are read with its states, right or wrong.

    backend: over a pool with the target's cache indices, and over the table without its first
    FIRST_PAIR positions. table: int32 (num_slots, max_context_len), with them. states: (num cache
    indices, hidden_size), fused ones.
    """

    first_position = FIRST_PAIR
    reads_last = False
    reads_target = True

    def __init__(
        self,
        head: PairHead,
        backend: AttentionBackend,
        table: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        self.backend = backend
        self.carried_size = states.shape[1]
        self._head = head
        self._passes = DevicePasses(backend)
        self._pool = backend.token_to_kv_pool
        self._table = table
        self._states = states

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        """A row's last token has one before it, since it was sampled."""
        return draft_chains(self, self._passes, step)

    def before(self, step: DrafterStep) -> None:
        """It waits for the target's states."""

    def behind(self, step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        """The first token of a request has no pair."""
        plan = step.plan
        self._states.index_copy_(0, step.out_cache_loc, self._head.fuse(taps))
        num_without = (plan.prefix_lens == 0).astype(np.int32)
        num_new = plan.num_new_tokens - num_without
        kept = np.flatnonzero(num_new)
        if not len(kept):
            return
        starts = (np.cumsum(plan.num_new_tokens) - plan.num_new_tokens + num_without)[kept]
        tokens = ranges(starts, num_new[kept])
        rows = PassRows(
            plan.slots[kept],
            (plan.prefix_lens + num_without - np.int32(FIRST_PAIR))[kept],
            num_new[kept],
            plan.out_cache_loc[tokens],
        )
        (own,) = upload([tokens], step.ids.device)
        ids = step.ids.index_select(0, own)
        batch = self._prepare(step, rows, kept, ids)
        self._head.read(ids, self._states_before(step, own), batch, self._pool)

    def _prepare(
        self, step: DrafterStep, rows: PassRows, kept: npt.NDArray[np.int64], ids: torch.Tensor
    ) -> ForwardBatch:
        """rows: those of the step's that are kept, with all tokens that have a pair."""
        return self._passes.prepare(rows, ids)

    def capture_obstacle(self, max_context_len: int) -> str:
        """As ChainDrafter.capture_obstacle."""
        return self._head.capture_obstacle()

    def carried_to(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The target's fused states of the tokens before these, none of them a draft of a tree."""
        return self._states.index_select(0, self._table[slots, places - 1].long())

    def _states_before(self, step: DrafterStep, tokens: torch.Tensor) -> torch.Tensor:
        """The same for tokens of the step, int64 (n,)."""
        slots = step.token_slots.index_select(0, tokens)
        return self.carried_to(slots, step.places.index_select(0, tokens))

    def draft(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ChainDrafter.draft: the head's own state goes with its draft."""
        made = self._head(ids, carried, batch)
        return self._head.named(self._head.likeliest(made)), made

    def read(self, ids: torch.Tensor, batch: ForwardBatch) -> None:
        """A pair is read behind the target's pass, with its states."""
