"""How a mixed step is cut for kernels that decode and prefill differently.

A prefill kernel gives every row tiles of 128 queries and never cuts a row's keys: decode rows that
go through it read their keys slower than the decode kernel does. Rows are counted on the host from
the step's own copies; device tensors are only viewed. Calls no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.forward_batch import ForwardBatch

MIN_DECODE_ROWS = 32
MAX_PROMPT_TOKENS_PER_DECODE_ROW = 32
"""Beyond either, one call is as fast: few decode rows save less than a second launch costs, and
beside long prompts the device is busy with those anyway. benchmarks/h200/mixed_steps.py measures
it: 248 decode rows are attended in half the time with one prompt of 300 tokens, and a percent
slower with eight of 1,000, which are 32 tokens a row. Steps that keep an inter-token target have
less than that."""


@dataclass(frozen=True, slots=True)
class MixedParts:
    """A step's leading decode rows and the rows after them, as layers of one window see them.

    decode: one query a row, from the step's first token on. prefill: cu_seqlens_q counts from the
    step's first token too, so that it goes with the whole step's queries and output and touches
    those of its own rows only.
    """

    decode: FlashAttentionMetadata
    prefill: FlashAttentionMetadata

    @property
    def num_decode_rows(self) -> int:
        return self.decode.batch_size


@dataclass(frozen=True, slots=True)
class StepCut:
    """What was decided about a step. whole: its metadata. parts: None where one call is better."""

    whole: FlashAttentionMetadata
    parts: MixedParts | None


def num_leading_decode_rows(forward_batch: ForwardBatch) -> int:
    """How many rows, from the first on, bring one token on top of a prefix. No device is asked."""
    is_decode = (forward_batch.extend_seq_lens_cpu == 1) & (
        forward_batch.extend_prefix_lens_cpu > 0
    )
    return len(is_decode) if is_decode.all() else int(np.argmin(is_decode))


def cut_mixed_step(metadata: FlashAttentionMetadata, num_decode_rows: int) -> MixedParts:
    """The two parts as views; num_decode_rows from num_leading_decode_rows, with rows after it."""
    n = num_decode_rows
    return MixedParts(
        decode=replace(
            metadata,
            cache_seqlens_int32=metadata.cache_seqlens_int32[:n],
            max_seq_len_q=1,
            cu_seqlens_q=metadata.cu_seqlens_q[: n + 1],
            cu_seqlens_k=metadata.cu_seqlens_k[: n + 1],
            page_table=metadata.page_table[:n],
        ),
        prefill=replace(
            metadata,
            cache_seqlens_int32=metadata.cache_seqlens_int32[n:],
            cu_seqlens_q=metadata.cu_seqlens_q[n:],
            cu_seqlens_k=metadata.cu_seqlens_k[n:],
            page_table=metadata.page_table[n:],
        ),
    )
