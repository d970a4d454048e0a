"""A pass of a drafter that keeps keys and values of its own at the target's cache indices.

Knows lengths and places; no model.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.visibility import CAUSAL, Tree, Visibility
from workers.scheduler.plan import IntArray
from workers.scheduler.plan_tree import depths_of
from workers.speculation.runs import ranges


class DraftPasses:
    """Makes the batches of one drafter, on the CPU.

    backend: over a pool with the target's cache indices. table: int32 (num_slots, n), the cache
    index of each position of a slot as the drafter counts them.
    """

    def __init__(self, backend: AttentionBackend, table: torch.Tensor) -> None:
        self._backend = backend
        self._table = table

    def prepare(
        self,
        slots: IntArray,
        prefix_lens: IntArray,
        num_new: IntArray,
        input_ids: torch.Tensor,
        parents: Sequence[IntArray] = (),
        visibility: Visibility = CAUSAL,
    ) -> ForwardBatch:
        """Of rows that bring num_new tokens behind prefix_lens ones, int32 (n,); input_ids: int64
        (num tokens,). parents: of rows that are trees, as in Tree.of_parents. visibility: of
        other rows. The backend is ready for it."""
        places = positions = torch.from_numpy(ranges(prefix_lens, num_new))
        if parents:
            visibility = Tree.of_parents(parents, places.device)
            depths = np.concatenate([depths_of(own) for own in parents])
            positions = torch.from_numpy(np.repeat(prefix_lens, num_new) + depths).long()
        of_tokens = int64(np.repeat(slots, num_new))
        seq_lens = prefix_lens + num_new
        is_decode = bool((num_new == 1).all())
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            batch_size=len(slots),
            num_tokens=len(input_ids),
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=int64(slots),
            seq_lens=torch.from_numpy(seq_lens),
            extend_seq_lens=torch.from_numpy(num_new),
            extend_prefix_lens=torch.from_numpy(prefix_lens),
            out_cache_loc=self._table[of_tokens, places].long(),
            seq_lens_cpu=seq_lens,
            extend_seq_lens_cpu=num_new,
            extend_prefix_lens_cpu=prefix_lens,
            attn_backend=self._backend,
            visibility=visibility,
        )
        self._backend.init_forward_metadata(batch)
        return batch


def int64(values: npt.NDArray[np.integer]) -> torch.Tensor:
    """As an index."""
    return torch.from_numpy(values.astype(np.int64))
