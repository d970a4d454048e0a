"""Drafts by a head: a layer that reads what the target made of a text (EAGLE-3, MTP).

The head sees pairs: a token, and the target's states of the token before it, fused. A pair's keys
and values stand at the cache index of its token, so that a page has those of nothing but the tokens
that it is found by; the first token of a request has none, and the head counts from the second one
on. Fused states stand in a pool of their own at the index of their token: a request that finds its
prefix goes on from them.

A draft is read with the head's own state in place of the target's. Once the target has said what
holds, pairs are read again with its states. What a wrong draft left is overwritten before it is
read.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.models.pair_states import StatesBefore
from workers.models.token_inputs import TokenInputs
from workers.scheduler.plan import AdmittedRequest, IntArray
from workers.speculation.draft_pass import DraftPasses, int64
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.runs import ranges
from workers.speculation.taps import StepTaps

FIRST_PAIR = 1
"""The position of the first token that has one before it, where the head begins to count."""


class PairHead(Protocol):
    """One layer over pairs, which has keys and values of its own."""

    def capture_obstacle(self) -> str:
        """What a pass does that a CUDA graph would not repeat; "" where a graph repeats all."""
        ...

    def fuse(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the target hands over of n tokens -> one state each, (n, hidden_size)."""
        ...

    def __call__(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Tokens, int64 (n,), and the states before them, (n, hidden_size) -> the head's own states
        in place of what the target would make of these tokens."""
        ...

    def read(
        self,
        tokens: TokenInputs,
        before: StatesBefore,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """Write what a pass would keep of the pairs to the pool, at cache_indices int64 (n,).
        Nothing attends, and a graph can have it."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The head's states (n, hidden_size) -> (n, tokens that the head can propose)."""
        ...

    def draft(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As __call__, behind what the head takes for likeliest to follow each of the tokens: the
        target's ids, int64 (n,), the same on every rank to the token."""
        ...

    @property
    def names(self) -> torch.Tensor | None:
        """The target's ids of the tokens that columns of logits are of, int64 (columns,); None:
        they are."""
        ...

    def named(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns of logits, int64 of any shape -> the target's ids of these tokens."""
        ...


class PairProposer:
    """Greedy chains, one pass of the head a draft; pairs that it has not read with the target's
    states are read behind the target's pass. On CPU.

    backend: over a pool with the target's cache indices, and over req_to_token_pool without its
    first FIRST_PAIR positions. states: (num cache indices, hidden_size), fused ones.
    """

    def __init__(
        self,
        history: TokenHistory,
        head: PairHead,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        states: torch.Tensor,
        taps: StepTaps,
    ) -> None:
        self._history = history
        self._head = head
        self._table = req_to_token_pool.req_to_token
        self._passes = DraftPasses(backend, self._table[:, FIRST_PAIR:])
        self._pool = backend.token_to_kv_pool
        self._states = states
        self._taps = taps
        # Of the step under way, by slot: whether propose read the token sampled last.
        self._has_read = np.zeros(len(self._table), dtype=np.int32)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Keys, values and states come with the pages, tokens with the history."""

    @torch.inference_mode()
    def propose(self, rows: DraftRows) -> Drafts:
        """A row reads as many tokens as it drafts: it has no place for more. Its last token has one
        before it, since it was sampled."""
        last = rows.lens - np.int32(1)
        ids, states = self._tokens(rows.slots, last), self._fused(rows.slots, last - 1)
        drafts = torch.zeros(len(rows.slots), rows.width, dtype=torch.int64)
        for column in range(rows.width):
            wanting = np.flatnonzero(rows.max_drafts > column)
            index = torch.from_numpy(wanting)
            before = ids[index] if column == 0 else drafts[index, column - 1]
            pairs = last[wanting] + np.int32(column - FIRST_PAIR)
            ones = np.ones(len(wanting), dtype=np.int32)
            batch = self._passes.prepare(rows.slots[wanting], pairs, ones, before)
            drafts[index, column], made = self._head.draft(before, states[index], batch)
            states = states.index_copy(0, index, made)
        self._has_read[rows.slots] = 1
        return Drafts(drafts, rows.max_drafts)

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        num_held = step.num_held.numpy().astype(np.int32)
        self._keep_states(step, num_held)
        # The first token of a row: read by propose, with the target's state, or without a pair.
        num_done = np.minimum(self._has_read[step.slots] | (step.prefix_lens == 0), num_held)
        self._has_read[step.slots] = 0
        unread = np.flatnonzero(num_held > num_done)
        if not len(unread):
            return
        slots, num_new = step.slots[unread], (num_held - num_done)[unread].astype(np.int32)
        starts = (step.prefix_lens + num_done)[unread].astype(np.int32)
        of_tokens, positions = np.repeat(slots, num_new), ranges(starts, num_new)
        pairs = torch.from_numpy(positions - FIRST_PAIR)
        tokens = TokenInputs(self._tokens(of_tokens, positions), pairs)
        before = StatesBefore(self._states, self._places(of_tokens, positions - 1))
        self._head.read(tokens, before, self._places(of_tokens, positions), self._pool)

    def _keep_states(self, step: ObservedStep, num_held: IntArray) -> None:
        """Of the tokens that hold; the taps have those of all that the step brought."""
        firsts = np.cumsum(self._taps.num_new) - self._taps.num_new
        held = torch.from_numpy(ranges(firsts, num_held))
        if step.moved is not None:
            held = step.moved.order[held]
        fused = self._head.fuse([tap[held] for tap in self._taps.states])
        slots, positions = np.repeat(step.slots, num_held), ranges(step.prefix_lens, num_held)
        self._states[self._places(slots, positions)] = fused

    def _tokens(self, slots: IntArray, positions: npt.NDArray[np.integer]) -> torch.Tensor:
        """Ids of the tokens there, int64 (n,)."""
        return self._history.token_ids[int64(slots), int64(positions)].long()

    def _fused(self, slots: IntArray, positions: npt.NDArray[np.integer]) -> torch.Tensor:
        """The target's fused states of the tokens there, (n, hidden_size)."""
        return self._states[self._places(slots, positions)]

    def _places(self, slots: IntArray, positions: npt.NDArray[np.integer]) -> torch.Tensor:
        """Cache indices of the tokens there, int64 (n,)."""
        return self._table[int64(slots), int64(positions)].long()
