"""Drafts by a model that proposes a block of tokens in one pass (DFlash).

A block is the token sampled last and masks behind it, each of which is to become a token; all of
them see each other and what the target made of the text before. What the drafter keeps of a token
that the target has read follows from the target's states of that token alone, and stands at its
cache index: a page that is shared has it. Tokens of a block write there, too; of those that hold it
is written again behind the target's pass, and what the others left is overwritten before it is
read.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.visibility import Everything
from workers.scheduler.plan import AdmittedRequest, IntArray
from workers.speculation.draft_pass import DraftPasses, int64
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.runs import ranges
from workers.speculation.taps import StepTaps

MOST_LOGITS = 256
"""Tokens whose logits are in memory at a time: a vocabulary's are large, and a product of few
tokens is bound by reading the head."""


class BlockDrafter(Protocol):
    """Layers that have keys and values of their own. block_size: tokens of a whole block, the known
    one included; fewer are a block, too."""

    block_size: int
    mask_token_id: int

    def keep(
        self,
        taps: Sequence[torch.Tensor],
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """Write what later blocks see of tokens that the target has read. taps: the target's states
        of these tokens, each (n, hidden_size); positions, cache_indices: int64 (n,)."""
        ...

    def __call__(self, ids: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Tokens of blocks, int64 (n,) -> their final states, (n, hidden_size)."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Final states (n, hidden_size) -> (n, vocab_size)."""
        ...


class BlockProposer:
    """Greedy chains, one pass a step. On CPU.

    backend: over a pool with the target's cache indices. table: int32 (num_slots, max_context_len),
    req_to_token. A row that is to have n drafts has a block of n + 1 tokens, which is what it has
    places for; n is less than the drafter's block_size.
    """

    def __init__(
        self,
        history: TokenHistory,
        drafter: BlockDrafter,
        backend: AttentionBackend,
        table: torch.Tensor,
        taps: StepTaps,
    ) -> None:
        self._history = history
        self._drafter = drafter
        self._passes = DraftPasses(backend, table)
        self._pool = backend.token_to_kv_pool
        self._table = table
        self._taps = taps

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Keys and values come with the pages, tokens with the history."""

    @torch.inference_mode()
    def propose(self, rows: DraftRows) -> Drafts:
        last, num_new = rows.lens - np.int32(1), rows.max_drafts + np.int32(1)
        firsts = int64(np.cumsum(num_new) - num_new)
        ids = torch.full((int(num_new.sum()),), self._drafter.mask_token_id, dtype=torch.int64)
        ids[firsts] = self._history.token_ids[int64(rows.slots), int64(last)].long()
        batch = self._passes.prepare(rows.slots, last, num_new, ids, visibility=Everything())
        states = self._drafter(ids, batch)
        masks = torch.ones(len(ids), dtype=torch.bool)
        masks[firsts] = False
        parts = torch.split(states[masks], MOST_LOGITS)
        likeliest = [self._drafter.logits(part).argmax(dim=-1) for part in parts]
        drafts = torch.zeros(len(rows.slots), rows.width, dtype=torch.int64)
        columns = ranges(np.zeros_like(rows.max_drafts), rows.max_drafts)
        of_rows = np.repeat(np.arange(len(rows.slots)), rows.max_drafts)
        drafts[torch.from_numpy(of_rows), torch.from_numpy(columns)] = torch.cat(likeliest)
        return Drafts(drafts, rows.max_drafts)

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        """Of the tokens that hold; the taps have those of all that the step brought."""
        num_held: IntArray = step.num_held.numpy().astype(np.int32)
        firsts = np.cumsum(self._taps.num_new) - self._taps.num_new
        held = torch.from_numpy(ranges(firsts, num_held))
        slots = int64(np.repeat(step.slots, num_held))
        positions = torch.from_numpy(ranges(step.prefix_lens, num_held)).long()
        indices = self._table[slots, positions].long()
        taps = [tap[held] for tap in self._taps.states]
        self._drafter.keep(taps, positions, indices, self._pool)
