"""Which keys a row's new tokens see, cell by cell: slow, obvious, and what masks are held to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from attention.forward_batch import ForwardBatch
from attention.visibility import Causal, Everything, Items, Tree, Visibility


class Bounds(Protocol):
    """Of a layer, as LayerAttentionConfig has them."""

    @property
    def sliding_window_size(self) -> int: ...

    @property
    def chunk_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OracleRow:
    """A row of a step: where its new tokens and its cells of a tree's mask begin, and the positions
    of all its tokens, the cached ones at their places."""

    first_token: int
    first_cell: int
    prefix_len: int
    positions: list[int]


def rows_of_batch(forward_batch: ForwardBatch) -> Iterator[OracleRow]:
    first_token = first_cell = 0
    for num_new, seq_len in zip(
        forward_batch.extend_seq_lens.tolist(), forward_batch.seq_lens.tolist(), strict=True
    ):
        new = forward_batch.positions[first_token : first_token + num_new].tolist()
        prefix_len = max(seq_len - num_new, 0)
        yield OracleRow(first_token, first_cell, prefix_len, [*range(prefix_len), *new])
        first_token += num_new
        first_cell += num_new**2


def seen_keys(visibility: Visibility, row: OracleRow, layer: Bounds) -> torch.Tensor:
    """bool (new tokens, tokens of the row), on the host."""
    num_keys = len(row.positions)
    return torch.tensor(
        [
            [
                _sees(visibility, row, query, key)
                and not _is_away(visibility, row, query, key, layer)
                for key in range(num_keys)
            ]
            for query in range(row.prefix_len, num_keys)
        ],
        dtype=torch.bool,
    ).view(-1, num_keys)


def _sees(visibility: Visibility, row: OracleRow, query: int, key: int) -> bool:
    """Whether the token at place query sees the one at place key, without window or chunks."""
    new = query - row.prefix_len
    match visibility:
        case Causal():
            return key <= query
        case Everything():
            return True
        case Tree(mask=mask):
            num_new = len(row.positions) - row.prefix_len
            cell = row.first_cell + new * num_new + key - row.prefix_len
            return key < row.prefix_len or bool(mask[cell])
        case Items(shared_keys=shared, first_own=own):
            token = row.first_token + new
            return key < int(shared[token]) or int(own[token]) <= key <= query


def _is_away(visibility: Visibility, row: OracleRow, query: int, key: int, layer: Bounds) -> bool:
    """Whether a window or a chunk hides the key for where it stands."""
    here, there = row.positions[query], row.positions[key]
    if isinstance(visibility, Items):
        is_own = key >= int(visibility.first_own[row.first_token + query - row.prefix_len])
        # An item's tokens stand one behind the other, cached ones too.
        there = here - (query - key) if is_own else key
    window, chunk = layer.sliding_window_size, layer.chunk_size
    is_symmetric = isinstance(visibility, Everything)
    if window > 0 and (here - there >= window or (is_symmetric and there - here >= window)):
        return True
    return chunk > 0 and (
        there // chunk < here // chunk or (is_symmetric and there // chunk != here // chunk)
    )
