"""The rows of a step as the torch_native backend runs them. Knows no layer's keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention.config import AttentionHeads
from attention.forward_batch import ForwardBatch
from attention.kernels.torch_decode import DecodeChunk, DecodePlanner
from attention.kernels.torch_extend import BlockBias, QueryBlock
from attention.kernels.torch_visible import SeenRow


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A row with several new tokens, first_token .. stop_token - 1 of the step.

    cache_indices: int32 (m,), the row's keys that any of its queries sees, oldest first. bias: what
    the row's queries see of them, None where that is what the layer's retention says.
    """

    first_token: int
    stop_token: int
    cache_indices: torch.Tensor
    blocks: tuple[QueryBlock, ...]
    bias: BlockBias | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A step as layers of one kind see it."""

    decode_chunks: list[DecodeChunk]
    extend_rows: list[ExtendRow]


@dataclass(frozen=True, slots=True)
class StepRows:
    """decode: int64 (n,), the rows of one new token, longest first; decode_slots: int64 (n,), their
    slots on the device. extend_starts: of each row with several new tokens its first one."""

    batch: ForwardBatch
    decode: npt.NDArray[np.int64]
    decode_slots: torch.Tensor
    extend_starts: dict[int, int]

    def num_new(self, row: int) -> int:
        return int(self.batch.extend_seq_lens_cpu[row])

    def slot(self, row: int) -> torch.Tensor:
        """int64 (1,) on the device."""
        return self.batch.req_pool_indices[row : row + 1]


def decode_planner(
    heads: AttentionHeads, table: torch.Tensor, num_cache_slots: int, max_chunk_key_bytes: int
) -> DecodePlanner:
    """For layers of such heads. max_chunk_key_bytes: of K in float32."""
    key_bytes = heads.tp_k_head_num * heads.head_dim * torch.float32.itemsize
    max_chunk_tokens = max(1, max_chunk_key_bytes // key_bytes)
    return DecodePlanner(
        table, num_cache_slots, heads.tp_q_head_num, heads.tp_k_head_num, max_chunk_tokens
    )


def seen_row(forward_batch: ForwardBatch, row: int, first_token: int, first_key: int) -> SeenRow:
    """first_token: the row's first new one in the step. first_key: of those that are gathered."""
    num_new = int(forward_batch.extend_seq_lens_cpu[row])
    cells = forward_batch.extend_seq_lens_cpu[:row].astype(np.int64) ** 2
    return SeenRow(
        first_token=first_token,
        first_cell=int(cells.sum()),
        first_key=first_key,
        prefix_len=int(forward_batch.extend_prefix_lens_cpu[row]),
        num_new=num_new,
        positions=forward_batch.positions[first_token : first_token + num_new],
    )
