"""Trees of drafts by a smaller model: at each depth what it takes for likeliest of all."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from workers.models.base import CausalLM
from workers.models.token_inputs import TokenInputs
from workers.scheduler.plan import IntArray
from workers.speculation.draft import DraftModelProposer
from workers.speculation.draft_pass import int64
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.tree_shape import Continuations, GrowingTree, growing_trees, joined


class DraftTreeProposer(DraftModelProposer):
    """One pass of the model a depth, which reads the whole tree so far: few tokens, of which a
    later one may not see all earlier ones, as it would if they were cached.

    tree: drafts at each depth. The rest as in DraftModelProposer. A draft stands at the cache index
    at which the target has it, and is moved as it is there.
    """

    def __init__(
        self,
        history: TokenHistory,
        model: CausalLM,
        backend: AttentionBackend,
        table: torch.Tensor,
        tree: tuple[int, ...],
    ) -> None:
        super().__init__(history, model, backend, table)
        self._tree = tree
        self._pool = backend.token_to_kv_pool

    @torch.inference_mode()
    def propose(self, rows: DraftRows) -> Drafts:
        """All drafts but those of the last depth are read."""
        trees = growing_trees(self._tree, rows)
        known = int64(rows.slots), int64(rows.lens - 1)
        roots = self._history.token_ids[known].tolist()
        for level in range(max(len(tree.widths) for tree in trees)):
            wanting = [row for row, tree in enumerate(trees) if len(tree.widths) > level]
            growing = [trees[row] for row in wanting]
            logits = self._read(rows, wanting, growing, [roots[row] for row in wanting])
            grow_by_logits(growing, logits)
        self._num_read[rows.slots] = [len(tree.widths) for tree in trees]
        return joined(trees, rows.width)

    def observe(self, step: ObservedStep) -> None:
        if step.moved is not None:
            self._pool.move_tokens(step.moved.sources, step.moved.targets)
        super().observe(step)

    def _read(
        self,
        rows: DraftRows,
        wanting: list[int],
        trees: Sequence[GrowingTree],
        roots: Sequence[int],
    ) -> torch.Tensor:
        """Logits behind the newest tokens of each tree, row after row: float (sum of newest,
        vocab)."""
        token_ids = [[root, *tree.token_ids] for root, tree in zip(roots, trees, strict=True)]
        parents = [np.array([-1, *tree.parents], dtype=np.int32) for tree in trees]
        num_new = np.array([len(own) for own in token_ids], dtype=np.int32)
        input_ids = torch.tensor([one for own in token_ids for one in own])
        slots, prefix_lens = rows.slots[wanting], rows.lens[wanting] - np.int32(1)
        batch = self._passes.prepare(slots, prefix_lens, num_new, input_ids, parents)
        tokens = TokenInputs(batch.input_ids, batch.positions)
        states = self._model.forward_rows(tokens, batch, newest_tokens(trees, num_new))
        return self._model.compute_logits(states.hidden)


def newest_tokens(trees: Sequence[GrowingTree], num_new: IntArray) -> torch.Tensor:
    """Where these stand among all rows' tokens, int64. num_new: int32 (n,), of each row."""
    starts = (np.cumsum(num_new) - num_new).tolist()
    own = zip(starts, trees, strict=True)
    return torch.tensor([start + place for start, tree in own for place in tree.newest])


def grow_by_logits(
    trees: Sequence[GrowingTree],
    logits: torch.Tensor,
    named: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """One level of each. logits: behind the newest tokens of each tree, row after row, float (sum
    of newest, n). named: from columns of logits to token ids; None: they are."""
    width = max(tree.widths[tree.num_levels] for tree in trees)
    values, indices = torch.log_softmax(logits.double(), dim=-1).topk(min(width, logits.shape[1]))
    logprobs, token_ids = values.numpy(), (indices if named is None else named(indices)).numpy()
    start = 0
    for tree in trees:
        own = slice(start, start + len(tree.newest))
        start = own.stop
        joint = tree.newest_logprobs()[:, None] + logprobs[own]
        parents = np.repeat(np.array(tree.newest, dtype=np.int32), joint.shape[1])
        tree.grow(Continuations(parents, token_ids[own].reshape(-1), joint.reshape(-1)))
