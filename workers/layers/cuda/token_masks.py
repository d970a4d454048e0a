"""Sampling under masks of allowed tokens on the device: each a launch for the whole batch.

Knows no grammar and no request. See workers.sampling.token_masks for the same in plain torch.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from workers.constraints.masks import StepMasks
from workers.layers.cuda.greedy import VOCAB_BLOCK, num_vocab_blocks
from workers.layers.cuda.launch import next_power_of_2
from workers.sampling.token_masks import FoundMasks
from workers.sampling.transfer import upload

_NO_MASK = -1


class DeviceMasks(NamedTuple):
    """words int32 (num masks, num words), and which of them each row has: int32 (n,), _NO_MASK for
    none."""

    words: torch.Tensor
    mask_of_row: torch.Tensor


def upload_masks(
    num_rows: int, found: FoundMasks, masks: StepMasks, device: torch.device
) -> DeviceMasks | None:
    """What was found for so many rows. None where no row has one. One copy from page-locked memory,
    which nobody waits for."""
    if not len(found.rows):
        return None
    mask_of_row = np.full(num_rows, _NO_MASK, dtype=np.int32)
    mask_of_row[found.rows] = found.own
    return DeviceMasks(*upload([masks.rows, mask_of_row], device))


def _allowed_block(
    logits: tl.tensor,
    words: tl.tensor,
    mask_of_row: tl.tensor,
    row: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_words: tl.tensor,
) -> tl.tensor:
    """Logits of some tokens of a row, float32; -inf where they are ruled out or none are left."""
    is_token = tokens < num_tokens
    values = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
    values = values.to(tl.float32)
    mask_row = tl.load(mask_of_row + row).to(tl.int64)
    is_masked = is_token & (tokens * 0 + mask_row >= 0)
    word = tl.load(words + mask_row * num_words + tokens // 32, mask=is_masked, other=-1)
    return tl.where((word >> (tokens % 32)) & 1 != 0, values, float("-inf"))


_allowed_block_kernel = triton.jit(_allowed_block)


def _rule_out(
    logits: tl.tensor,
    words: tl.tensor,
    mask_of_row: tl.tensor,
    allowed: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _allowed_block_kernel(
        logits, words, mask_of_row, row, tokens, row_stride, num_tokens, num_words
    )
    tl.store(allowed + row * num_tokens + tokens, values, mask=tokens < num_tokens)


_rule_out_kernel = triton.jit(_rule_out)


def rule_out(logits: torch.Tensor, masks: DeviceMasks) -> torch.Tensor:
    """logits (n, vocab_size), contiguous but for its rows, in float32: -inf for tokens that the
    row's mask rules out."""
    num_rows, num_tokens = logits.shape
    allowed = torch.empty((num_rows, num_tokens), dtype=torch.float32, device=logits.device)
    _rule_out_kernel[num_rows, num_vocab_blocks(num_tokens)](
        logits,
        masks.words,
        masks.mask_of_row,
        allowed,
        logits.stride(0),
        num_tokens,
        masks.words.shape[1],
        BLOCK=VOCAB_BLOCK,
        num_warps=8,
    )
    return allowed


def _masked_argmax(  # noqa: PLR0913
    logits: tl.tensor,
    words: tl.tensor,
    mask_of_row: tl.tensor,
    block_max: tl.tensor,
    block_token: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One block of one row. block_token is -1 where an allowed logit is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = _allowed_block_kernel(
        logits, words, mask_of_row, row, tokens, row_stride, num_tokens, num_words
    )
    is_nan = values != values
    values = tl.where(is_nan, float("-inf"), values)
    largest = tl.max(values, axis=0)
    first = tl.min(tl.where(values == largest, tokens, num_tokens), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    at = row * tl.num_programs(1) + block
    tl.store(block_max + at, largest)
    tl.store(block_token + at, tl.where(has_nan, -1, first))


_masked_argmax_kernel = triton.jit(_masked_argmax)


def _join_blocks(
    block_max: tl.tensor,
    block_token: tl.tensor,
    token_ids: tl.tensor,
    has_nan: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One row."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCK)
    is_block = blocks < num_blocks
    maxima = tl.load(block_max + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    tokens = tl.load(block_token + row * num_blocks + blocks, mask=is_block, other=2147483647)
    is_nan = tl.min(tokens, axis=0) < 0
    largest = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == largest, tokens, 2147483647), axis=0)
    tl.store(token_ids + row, tl.where(is_nan, 0, token).to(tl.int64))
    tl.store(has_nan + row, is_nan)


_join_blocks_kernel = triton.jit(_join_blocks)


def greedy(logits: torch.Tensor, masks: DeviceMasks) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest allowed token of each row of logits (n, vocab_size), the lowest among equals,
    int64 (n,), and whether an allowed logit was a NaN, bool (n,). In two launches; no logit is
    written."""
    num_rows, num_tokens = logits.shape
    size = num_rows, num_vocab_blocks(num_tokens)
    block_max = torch.empty(size, dtype=torch.float32, device=logits.device)
    block_token = torch.empty(size, dtype=torch.int32, device=logits.device)
    _masked_argmax_kernel[size](
        logits,
        masks.words,
        masks.mask_of_row,
        block_max,
        block_token,
        logits.stride(0),
        num_tokens,
        masks.words.shape[1],
        BLOCK=VOCAB_BLOCK,
        num_warps=8,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    has_nan = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _join_blocks_kernel[(num_rows,)](
        block_max,
        block_token,
        token_ids,
        has_nan,
        size[1],
        BLOCK=next_power_of_2(size[1]),
        num_warps=1,
    )
    return token_ids, has_nan
