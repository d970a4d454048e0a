"""The cells of a step's draft trees, windows and chunks included, for FlexAttention's masks."""

from __future__ import annotations

import numpy as np
import torch

from attention.forward_batch import ForwardBatch
from attention.kernels.flex_tiles import upload
from attention.memory.layout import EveryToken, Retention
from attention.visibility import Tree

MIN_CELLS = 2  # torch compiles sizes of 0 and 1 anew


class TreeCells:
    """first_cells: int64 (num_tokens,), where the cells of each new token begin: one for each new
    token of its row."""

    def __init__(self, tree: Tree, forward_batch: ForwardBatch) -> None:
        num_new = forward_batch.extend_seq_lens_cpu.astype(np.int64)
        starts = np.cumsum(num_new) - num_new
        of_token = np.repeat(np.arange(len(num_new)), num_new)
        num_cells = num_new[of_token]
        first_cells = np.cumsum(num_cells) - num_cells
        queries = np.repeat(np.arange(len(of_token)), num_cells)
        keys = np.arange(len(queries)) - first_cells[queries] + starts[of_token[queries]]
        sizes = [len(first_cells), len(queries), len(keys)]
        flat = upload(np.concatenate([first_cells, queries, keys]), tree.mask.device)
        self.first_cells, self._queries, self._keys = torch.split(flat, sizes)
        self._tree = tree
        self._positions = forward_batch.positions

    def seen(self, retention: Retention) -> torch.Tensor:
        """bool (n,): what the tree shows and the retention does not hide."""
        seen = self._tree.mask
        if not isinstance(retention, EveryToken):
            first = retention.first_visible(self._positions[self._queries])
            seen = seen & (self._positions[self._keys] >= first)
        return torch.nn.functional.pad(seen, (0, max(0, MIN_CELLS - len(seen))))
