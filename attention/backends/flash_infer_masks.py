"""What a step's new tokens see, as FlashInfer's packed masks: a bit for each pair of a new token
and a key of its row, which cover windows too.

Made row by row in plain torch on the step's device, with the host's lengths. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attention.backends.torch_native_rows import seen_row
from attention.forward_batch import ForwardBatch
from attention.kernels.torch_extend import QueryBlock
from attention.kernels.torch_visible import VisibleBias
from attention.memory.layout import Retention
from attention.visibility import Causal

_BITS = 8
_QUERIES_PER_BLOCK = 256  # a multiple of 8, so that a block's bits end with a byte


@dataclass(frozen=True, slots=True)
class PackedMask:
    """bits: uint8, row after row, the lowest bit first. begins: int32 (bs,), each row's first
    byte."""

    bits: torch.Tensor
    begins: torch.Tensor


def pack_mask(forward_batch: ForwardBatch, retention: Retention) -> PackedMask:
    """Of a step that is not plainly causal, for layers of one retention."""
    new_lens = forward_batch.extend_seq_lens_cpu.astype(np.int64)
    num_bytes = -(-new_lens * forward_batch.seq_lens_cpu // _BITS)
    begins = torch.from_numpy((np.cumsum(num_bytes) - num_bytes).astype(np.int32))
    device = forward_batch.positions.device
    first_tokens = np.cumsum(new_lens) - new_lens
    parts = [
        part
        for row, first_token in enumerate(first_tokens.tolist())
        for part in _pack_row(forward_batch, row, first_token, retention)
    ]
    bits = torch.cat([torch.zeros(0, dtype=torch.uint8, device=device), *parts])
    return PackedMask(bits, begins.to(device, non_blocking=True))


def _pack_row(
    forward_batch: ForwardBatch, row: int, first_token: int, retention: Retention
) -> Iterator[torch.Tensor]:
    visibility = forward_batch.visibility
    if isinstance(visibility, Causal):
        raise ValueError("causal steps need no mask")
    num_new = int(forward_batch.extend_seq_lens_cpu[row])
    num_keys = int(forward_batch.seq_lens_cpu[row])
    seen = seen_row(forward_batch, row, first_token, first_key=0)
    bias = VisibleBias(seen, visibility, retention, torch.float32)
    for first in range(0, num_new, _QUERIES_PER_BLOCK):
        block = QueryBlock(first, min(first + _QUERIES_PER_BLOCK, num_new), 0, num_keys)
        yield _packed(bias.seen(block))


def _packed(cells: torch.Tensor) -> torch.Tensor:
    """bool of any shape to uint8, the last byte filled up with zeros."""
    flat = cells.reshape(-1).to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % _BITS)).view(-1, _BITS)
    bits = flat << torch.arange(_BITS, dtype=torch.uint8, device=flat.device)
    return bits.sum(dim=1, dtype=torch.uint8)
