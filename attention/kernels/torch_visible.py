"""What a row's new tokens see where that is not plainly causal, as masks in plain torch.

Block by block, so that no row's whole mask is ever made. Knows no batch, no pool and no K or V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kernels.torch_extend import QueryBlock
from attention.memory.layout import Retention
from attention.visibility import Everything, Items, Tree


@dataclass(frozen=True, slots=True)
class SeenRow:
    """A row of a step. first_token: its first new token's place in the step. first_cell: where its
    cells of a tree's mask begin. first_key: the first of its keys that a block counts from.
    positions: int64 (num_new,), of its new tokens."""

    first_token: int
    first_cell: int
    first_key: int
    prefix_len: int
    num_new: int
    positions: torch.Tensor


class VisibleBias:
    """Additive masks of one row's blocks, for layers of one retention."""

    def __init__(
        self,
        row: SeenRow,
        visibility: Tree | Items | Everything,
        retention: Retention,
        dtype: torch.dtype,
    ) -> None:
        self._row = row
        self._visibility = visibility
        self._retention = retention
        self._dtype = dtype

    def block(self, block: QueryBlock) -> torch.Tensor:
        """0 or -inf, (queries, keys) of the block."""
        seen = self.seen(block)
        bias = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return bias.masked_fill_(~seen, -torch.inf)

    def seen(self, block: QueryBlock) -> torch.Tensor:
        """bool (queries, keys) of the block."""
        row, device = self._row, self._row.positions.device
        queries = torch.arange(block.first_query, block.stop_query, device=device)
        keys = torch.arange(block.first_key, block.stop_key, device=device) + row.first_key
        positions = row.positions[queries].unsqueeze(1)
        match self._visibility:
            case Tree(mask=mask):
                seen, key_positions = self._of_tree(mask, queries, keys), self._positions_of(keys)
            case Items() as items:
                seen, key_positions = self._of_items(items, queries, keys, positions)
            case Everything():
                key_positions = self._positions_of(keys)
                seen = positions >= self._retention.first_visible(key_positions)
        return seen & (key_positions >= self._retention.first_visible(positions))

    def _of_tree(
        self, mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        row = self._row
        cells = mask[row.first_cell : row.first_cell + row.num_new**2].view(row.num_new, -1)
        among_new = cells[queries][:, (keys - row.prefix_len).clamp(min=0)]
        return among_new | (keys < row.prefix_len)

    def _of_items(
        self, items: Items, queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is seen, and where keys stand: those of a token's own item as far before it as
        their places are, the shared ones at their places."""
        tokens = self._row.first_token + queries
        own = items.first_own[tokens].unsqueeze(1)
        shared = items.shared_keys[tokens].unsqueeze(1)
        places = (self._row.prefix_len + queries).unsqueeze(1)
        is_own = (keys >= own) & (keys <= places)
        return is_own | (keys < shared), torch.where(keys >= own, positions - places + keys, keys)

    def _positions_of(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 (1, keys): cached tokens stand at their places."""
        new = (keys - self._row.prefix_len).clamp(min=0)
        is_cached = keys < self._row.prefix_len
        return torch.where(is_cached, keys, self._row.positions[new]).unsqueeze(0)
