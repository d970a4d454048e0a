"""A step's rows cut where chunks of positions begin, and the tables that kernels read of them.

In plain torch and numpy, on any device; waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention.forward_batch import ForwardBatch
from attention.kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Each row's new tokens of one chunk, in the order of the step's tokens.

    rows: int64 (n,), of the batch. first_keys, num_keys, num_new: int32 (n,), where the chunk
    begins in its row, how many of its tokens there are with the new ones, and how many are new.
    max_*: of any, as far as the host knows.
    """

    rows: torch.Tensor
    first_keys: torch.Tensor
    num_keys: torch.Tensor
    num_new: torch.Tensor
    max_new_tokens: int
    max_keys: int

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]


def chunk_rows(batch: ForwardBatch, chunk_size: int) -> ChunkRows:
    """Of rows of any number of new tokens, from the host's copies."""
    starts = batch.extend_prefix_lens_cpu.astype(np.int64)
    stops = starts + batch.extend_seq_lens_cpu
    first_chunks = starts // chunk_size
    num_chunks = np.where(stops > starts, (stops - 1) // chunk_size - first_chunks + 1, 0)
    rows = np.repeat(np.arange(batch.batch_size), num_chunks)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    first_keys = (first_chunks[rows] + within) * chunk_size
    key_stops = np.minimum(stops[rows], first_keys + chunk_size)
    num_new = key_stops - np.maximum(starts[rows], first_keys)
    num_keys = key_stops - first_keys
    host = np.stack([rows, first_keys, num_keys, num_new])
    device = torch.from_numpy(host).to(batch.seq_lens.device, non_blocking=True)
    own_first_keys, own_num_keys, own_num_new = device[1:].int()
    return ChunkRows(
        device[0],
        own_first_keys,
        own_num_keys,
        own_num_new,
        int(num_new.max(initial=0)),
        int(num_keys.max(initial=0)),
    )


def decoding_chunk_rows(batch: ForwardBatch, chunk_size: int) -> ChunkRows:
    """Of rows of one new token each, from device tensors only. Padding has no keys."""
    lens, device = batch.seq_lens, batch.seq_lens.device
    first_keys = (lens - 1).clamp(min=0) // chunk_size * chunk_size
    rows = torch.arange(batch.batch_size, device=device)
    ones = torch.ones_like(lens)
    return ChunkRows(rows, first_keys, lens - first_keys, ones, 1, chunk_size)


def fill_chunk_tables(
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    rows: ChunkRows,
    tables: StepTables,
    page_size: int,
) -> None:
    """Fill the first rows of tables. req_to_token int32 (num_slots, max_context_len); slots int64
    (bs,). Chunks begin where pages do. The dummy page stands behind a chunk's last one."""
    n = rows.num_rows
    tables.cache_seqlens[:n] = rows.num_keys
    torch.cumsum(rows.num_new, 0, dtype=torch.int32, out=tables.cu_seqlens_q[1 : n + 1])
    torch.cumsum(rows.num_keys, 0, dtype=torch.int32, out=tables.cu_seqlens_k[1 : n + 1])
    offsets = torch.arange(tables.page_table.shape[1], device=slots.device) * page_size
    positions = rows.first_keys.unsqueeze(1) + offsets
    last = req_to_token.shape[1] - 1
    found = req_to_token[slots[rows.rows].unsqueeze(1), positions.clamp(max=last)]
    is_seen = offsets < rows.num_keys.unsqueeze(1)
    tables.page_table[:n] = torch.where(is_seen, found // page_size, 0)
