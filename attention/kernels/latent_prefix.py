"""Cached tokens of several rows as flat keys, piece by piece: so many that K and V of every head,
made of their latents, stay small. Waits for no device. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention.memory.req_to_token_pool import ReqToTokenPool


@dataclass(frozen=True, slots=True)
class CachedRows:
    """What rows have in the pool before the step. slots: int64 (rows,). lens: int32 (rows,) on the
    device, lens_cpu its copy on the host."""

    slots: torch.Tensor
    lens: torch.Tensor
    lens_cpu: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Neighbouring cached tokens of each row, none of some. cache_indices: int64 (keys,), row after
    row. cu_seqlens: int32 (rows + 1,), where a row's keys start. max_keys: of any row."""

    cache_indices: torch.Tensor
    cu_seqlens: torch.Tensor
    max_keys: int


def prefix_pieces(
    table: ReqToTokenPool, rows: CachedRows, max_tokens: int
) -> Iterator[PrefixPiece]:
    """Pieces of at most max_tokens keys, or of one key a row, that hold each cached token once."""
    first, longest = 0, int(rows.lens_cpu.max(initial=0))
    while first < longest:
        num_rows = int((rows.lens_cpu > first).sum())
        width = max(1, max_tokens // num_rows)
        yield _piece(table, rows, first, width)
        first += width


def _piece(table: ReqToTokenPool, rows: CachedRows, first: int, width: int) -> PrefixPiece:
    """Positions first .. first + width - 1 of the rows that have them."""
    device = rows.lens.device
    lens_cpu = (rows.lens_cpu - first).clip(0, width)
    num_keys = int(lens_cpu.sum())
    lens = (rows.lens - first).clamp(0, width)
    cu_seqlens = torch.zeros(len(lens_cpu) + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens, 0, out=cu_seqlens[1:])
    # The host knows the sum, so that nothing asks the device for it.
    row_of_key = torch.repeat_interleave(
        torch.arange(len(lens_cpu), device=device), lens, output_size=num_keys
    )
    positions = torch.arange(first, first + num_keys, device=device) - cu_seqlens[row_of_key]
    cache_indices = table.req_to_token[rows.slots[row_of_key], positions].long()
    return PrefixPiece(cache_indices, cu_seqlens, int(lens_cpu.max()))
