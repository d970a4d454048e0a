"""What a step's layers share when FlashAttention reads paged KV memory. Calls no kernel.

Lengths and pages are device tensors; the maxima beside them come from the host's own copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class FlashAttentionMetadata:
    """A step of bs rows as layers of one window see it (fields as SGLang's class of this name).

    cache_seqlens_int32 int32 (bs,): keys of each row, the new tokens' included. cu_seqlens_q,
    cu_seqlens_k int32 (bs + 1,): where each row's queries and keys start in a flat layout.
    max_seq_len_q, max_seq_len_k: upper bounds known to the host, tokens. page_table int32
    (bs, >= pages of the longest row). window_size: (left, right) neighbours that a query sees
    beside its own key, -1 for all; causal masking comes on top.
    """

    cache_seqlens_int32: torch.Tensor
    max_seq_len_q: int
    max_seq_len_k: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    window_size: tuple[int, int]

    @property
    def batch_size(self) -> int:
        return self.cache_seqlens_int32.shape[0]


def kernel_window(sliding_window_size: int) -> tuple[int, int]:
    """FlashAttention's window_size. Ours counts the keys a query sees, itself included; the
    kernel's left side counts the keys before it."""
    return (sliding_window_size - 1, 0) if sliding_window_size > 0 else (-1, -1)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the host knows of a step."""

    batch_size: int
    max_seq_len_q: int
    max_seq_len_k: int


def metadata_of(tables: StepTables, facts: StepFacts, window: int) -> FlashAttentionMetadata:
    """The tables' first rows as layers of one sliding_window_size see them: views, no copy."""
    bs = facts.batch_size
    return FlashAttentionMetadata(
        cache_seqlens_int32=tables.cache_seqlens[:bs],
        max_seq_len_q=facts.max_seq_len_q,
        max_seq_len_k=facts.max_seq_len_k,
        cu_seqlens_q=tables.cu_seqlens_q[: bs + 1],
        cu_seqlens_k=tables.cu_seqlens_k[: bs + 1],
        page_table=tables.page_table[:bs],
        window_size=kernel_window(window),
    )
