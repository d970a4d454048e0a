"""Drafts by a head on a rank's device. See pairs.py, which does the same on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from workers.sampling.transfer import upload
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DrafterStep
from workers.speculation.pairs import FIRST_PAIR, PairHead
from workers.speculation.runs import ranges


class DevicePairs:
    """As DeviceDrafter: greedy chains, one pass of the head a draft. Behind the target's pass the
    pairs of all tokens are read with its states, right or wrong.

    backend: over a pool with the target's cache indices, and over the table without its first
    FIRST_PAIR positions. table: int32 (num_slots, max_context_len), with them. states: (num cache
    indices, hidden_size), fused ones.
    """

    def __init__(
        self,
        head: PairHead,
        backend: AttentionBackend,
        table: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        self._head = head
        self._passes = DevicePasses(backend)
        self._pool = backend.token_to_kv_pool
        self._table = table
        self._states = states

    @property
    def reads_target(self) -> bool:
        return True

    def propose(self, step: DrafterStep) -> torch.Tensor:
        """A row's last token has one before it, since it was sampled."""
        runs, device = step.runs, step.ids.device
        drafts = torch.zeros(len(runs), runs.width, dtype=torch.int64, device=device)
        (firsts,) = upload([runs.firsts], device)
        before = step.ids.index_select(0, firsts)
        states = self._states_before(step, firsts)
        for column in range(runs.width):
            wanting = np.flatnonzero(runs.num_drafts > column)
            (index,) = upload([wanting], device)
            rows = PassRows(
                runs.slots[wanting],
                runs.prefix_lens[wanting] + np.int32(column - FIRST_PAIR),
                np.ones(len(wanting), dtype=np.int32),
                step.plan.out_cache_loc[runs.firsts[wanting] + column],
            )
            ids = before.index_select(0, index)
            batch = self._passes.prepare(rows, ids)
            made = self._head(ids, states.index_select(0, index), batch)
            states = states.index_copy(0, index, made)
            likeliest = self._head.named(self._head.logits(made).argmax(dim=-1))
            before = before.index_copy(0, index, likeliest)
            drafts[:, column] = before
        return drafts

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
        batch = self._passes.prepare(rows, ids)
        self._head.read(ids, self._states_before(step, own), batch, self._pool)

    def _states_before(self, step: DrafterStep, tokens: torch.Tensor) -> torch.Tensor:
        """The target's fused states of the tokens before these of the step's, int64 (n,) ->
        (n, hidden_size)."""
        slots = step.token_slots.index_select(0, tokens)
        positions = step.positions.index_select(0, tokens) - 1
        return self._states.index_select(0, self._table[slots, positions].long())
