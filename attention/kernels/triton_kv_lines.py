"""Triton: tokens that are kept move up to where their row's kept ones stand, in all layers at once.

Tensors in, pages written; knows no tree and no pool object. Imports Triton: load it by way of
attention.kernels.providers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _line_up(
    tokens: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    starts: tl.tensor,
    num_kept: tl.tensor,
    layer_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Program (row, layer, part of a token). One after the other: a source stands at its target or
    behind it, so that nobody has overwritten it; a thread writes the words that it has read."""
    row, first = tl.program_id(0), tl.load(starts + tl.program_id(0))
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_real = words < size
    base = tokens + tl.program_id(1).to(tl.int64) * layer_stride + words
    for place in range(tl.load(num_kept + row)):
        source = tl.load(sources + first + place)
        target = tl.load(targets + first + place)
        if source != target:
            read = tl.load(base + source * size, mask=is_real)
            tl.store(base + target * size, read, mask=is_real)


_line_up_kernel = triton.jit(
    _line_up,
    do_not_specialize=("layer_stride",),
    do_not_specialize_on_alignment=("sources", "targets", "starts", "num_kept"),
)


def line_up(
    tokens: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    starts: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    """As TokenToKVPool.line_up, of tokens (layers, cache indices, ...), each contiguous."""
    num_layers, num_indices = tokens.shape[:2]
    num_bytes = tokens[0, 0].numel() * tokens.itemsize
    word_bytes = next(one for one in _WORDS if num_bytes % one == 0)
    words = tokens.view(num_layers, num_indices, -1).view(_WORDS[word_bytes])
    size = num_bytes // word_bytes
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    _line_up_kernel[(len(num_kept), num_layers, triton.cdiv(size, block))](
        words,
        sources,
        targets,
        starts,
        num_kept,
        words.stride(0),
        size,
        BLOCK=block,
        num_warps=4,
    )
