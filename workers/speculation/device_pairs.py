"""Drafts by a head on a rank's device. See pairs.py, which does the same on the host."""

from collections.abc import Sequence

import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.models.pair_states import StatesBefore
from workers.models.token_inputs import TokenInputs
from workers.speculation.device_chain import draft_chains
from workers.speculation.device_pass import DevicePasses
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.pairs import FIRST_PAIR, PairHead


class DevicePairs:
    """As DeviceDrafter: greedy chains, one pass of the head a draft. Behind the target's pass the
    pairs of all tokens are read with its states, right or wrong.

    The first token of a request has no pair. What stands at its place is any, since the head's
    table does not have it: no pass sees it.

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
        """See DeviceDrafter."""
        self._states.index_copy_(0, step.out_cache_loc, self._head.fuse(taps))
        before, indices = self._before(step)
        states = StatesBefore(self._states, indices)
        self._head.read(TokenInputs(step.ids, before), states, step.out_cache_loc, self._pool)

    def behind_decode(self, batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        """See DeviceDrafter."""
        self._states.index_copy_(0, batch.out_cache_loc, self._head.fuse(taps))
        before = _behind_first(batch.positions)
        states = StatesBefore(self._states, self._table[batch.req_pool_indices, before])
        tokens = TokenInputs(batch.input_ids, before)
        self._head.read(tokens, states, batch.out_cache_loc, self._pool)

    def capture_obstacle(self, max_context_len: int) -> str:
        """As ChainDrafter.capture_obstacle."""
        return self._head.capture_obstacle()

    def carried_to(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The target's fused states of the tokens before these, none of them a draft of a tree: in
        the table a pair stands where the text has the token before it."""
        return self._states.index_select(0, self._table[slots, positions])

    def _before(self, step: DrafterStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions, int64, and cache indices, int, of the tokens before the step's, (num_tokens,)
        both; 0 and any for first ones."""
        before = _behind_first(step.positions)
        return before, self._table[step.token_slots, before]

    def draft(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ChainDrafter.draft: the head's own state goes with its draft."""
        return self._head.draft(ids, carried, batch)

    def read(self, ids: torch.Tensor, batch: ForwardBatch) -> None:
        """A pair is read behind the target's pass, with its states."""


def _behind_first(positions: torch.Tensor) -> torch.Tensor:
    """Positions of tokens, int64 (n,) -> those that the head counts, and those of the tokens before
    them. Of a first token, which has neither, 0."""
    return (positions - FIRST_PAIR).clamp_(min=0)
