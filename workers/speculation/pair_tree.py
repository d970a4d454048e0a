"""Trees of drafts by a head: at each depth what it takes for likeliest of all."""

from collections.abc import Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.memory.req_to_token_pool import ReqToTokenPool
from workers.speculation.draft_tree import grow_by_logits, newest_tokens
from workers.speculation.history import TokenHistory
from workers.speculation.pairs import FIRST_PAIR, PairHead, PairProposer
from workers.speculation.proposer import DraftRows, Drafts
from workers.speculation.taps import StepTaps
from workers.speculation.tree_shape import GrowingTree, growing_trees, joined


class PairTreeProposer(PairProposer):
    """One pass of the head a depth, which reads the whole tree so far: a draft with the state that
    the head made of its parent. tree: drafts at each depth. The rest as in PairProposer.

    What holds is read again with the target's states and written where it stands then: nothing of
    what the head kept of drafts has to be moved.
    """

    def __init__(
        self,
        history: TokenHistory,
        head: PairHead,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        states: torch.Tensor,
        taps: StepTaps,
        tree: tuple[int, ...],
    ) -> None:
        super().__init__(history, head, backend, req_to_token_pool, states, taps)
        self._tree = tree

    @torch.inference_mode()
    def propose(self, rows: DraftRows) -> Drafts:
        """All drafts but those of the last depth are read."""
        trees = growing_trees(self._tree, rows)
        last = rows.lens - np.int32(1)
        ids, states = self._tokens(rows.slots, last), self._fused(rows.slots, last - 1)
        reads = [
            _Reading(tree, int(token_id), states[row : row + 1])
            for row, (tree, token_id) in enumerate(zip(trees, ids.tolist(), strict=True))
        ]
        for level in range(max(len(tree.widths) for tree in trees)):
            wanting = [row for row, tree in enumerate(trees) if len(tree.widths) > level]
            self._read(rows, wanting, [reads[row] for row in wanting])
        self._has_read[rows.slots] = 1
        return joined(trees, rows.width)

    def _read(self, rows: DraftRows, wanting: list[int], reads: "Sequence[_Reading]") -> None:
        """One pass, and one level of each tree."""
        num_new = np.array([len(one.token_ids()) for one in reads], dtype=np.int32)
        ids = torch.tensor([token_id for one in reads for token_id in one.token_ids()])
        parents = [np.array([-1, *one.tree.parents], dtype=np.int32) for one in reads]
        pairs = rows.lens[wanting] - np.int32(1 + FIRST_PAIR)
        batch = self._passes.prepare(rows.slots[wanting], pairs, num_new, ids, parents)
        states = torch.cat([one.states() for one in reads])
        made = self._head(ids, states, batch)
        for one, own in zip(reads, torch.split(made, num_new.tolist()), strict=True):
            one.made = own
        trees = [one.tree for one in reads]
        logits = self._head.logits(made[newest_tokens(trees, num_new)])
        grow_by_logits(trees, logits, self._head.named)


class _Reading:
    """A tree and what the head reads of it. root_id: the token sampled last. root_state: (1,
    hidden_size), the target's of the token before. made: (n, hidden_size), what the head made of
    the row's tokens in the last pass."""

    def __init__(self, tree: GrowingTree, root_id: int, root_state: torch.Tensor) -> None:
        self.tree = tree
        self._root_id = root_id
        self._root_state = root_state
        self.made = root_state[:0]

    def token_ids(self) -> list[int]:
        return [self._root_id, *self.tree.token_ids]

    def states(self) -> torch.Tensor:
        """What each token is read with, (n, hidden_size)."""
        return torch.cat([self._root_state, self.made[self.tree.parents]])
