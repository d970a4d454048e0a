"""A level of trees of drafts from logits: two launches, whatever the vocabulary and the widths.

As DeviceTrees.grown, whose choice this is. The first kernel cuts the vocabulary into parts, so that
few rows fill a GPU, and keeps each part's likeliest tokens and its share of the softmax's sum; the
second one has a program for each row of trees, which joins its parts and appends the level. Of
equals the lower column comes first, of equals behind several tokens those of the first of these.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.speculation.device_tree import DeviceTrees

_PART_TOKENS = 2048
_FEW_TOKENS = 1 << 16
_MAX_OF_ONE_WARP = 512
_HIGHEST = tl.constexpr((1 << 31) - 1)
_TAKEN = tl.constexpr(-(1 << 63))
_COLUMN_BITS = tl.constexpr(32)
_COLUMN_MASK = tl.constexpr((1 << 32) - 1)
_NUMBER = tl.constexpr(2)
_NO_NUMBER = tl.constexpr(1)
_NOTHING = tl.constexpr(0)


def _keep_likeliest(  # noqa: PLR0913
    logits: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_kept: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (row of logits, part): the part's maximum, its sum of exponentials beside that, and
    its likeliest tokens in order, column -1 where it has fewer.

    A token's key has its logit in the upper half, as likeliest.py orders them, and in the lower one
    its column, reversed: no two are equal.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    at = part * BLOCK + places
    is_real = at < num_tokens
    begin_dependent(IS_DEPENDENT)
    loaded = tl.load(logits + row * row_stride + at, mask=is_real, other=-float("inf"))
    own = loaded.to(tl.float32)
    peak = tl.max(own, 0)
    cell = row * tl.num_programs(1) + part
    tl.store(peaks + cell, peak)
    tl.store(sums + cell, tl.sum(tl.exp(own - tl.where(peak == -float("inf"), 0.0, peak)), 0))
    bits = tl.where(own == 0.0, 0.0, own).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    order = tl.where(own != own, _HIGHEST, order).to(tl.int64)
    keys = tl.where(is_real, (order << _COLUMN_BITS) + (BLOCK - 1 - places), _TAKEN)
    for rank in range(num_kept):
        best = tl.max(keys, 0)
        column = part * BLOCK + BLOCK - 1 - (best & _COLUMN_MASK).to(tl.int32)
        found = (best >> _COLUMN_BITS).to(tl.int32)
        value = tl.where(found < 0, found ^ _HIGHEST, found).to(tl.float32, bitcast=True)
        tl.store(values + cell * num_kept + rank, value)
        tl.store(columns + cell * num_kept + rank, tl.where(best == _TAKEN, -1, column))
        keys = tl.where(keys == best, _TAKEN, keys)


_keep_likeliest_kernel = triton.jit(_keep_likeliest, do_not_specialize=("num_kept",))


def _log_sums(peaks: tl.tensor, sums: tl.tensor, at: tl.tensor, is_part: tl.tensor) -> tl.tensor:
    """log(sum(exp(logits))) of each row of at, whose columns are its parts."""
    own = tl.load(peaks + at, mask=is_part, other=-float("inf"))
    top = tl.max(own, 1)
    base = tl.where(top == -float("inf"), 0.0, top)
    shares = tl.load(sums + at, mask=is_part, other=0.0) * tl.exp(own - base[:, None])
    return base + tl.log(tl.sum(shares, 1))


log_sums = triton.jit(_log_sums)


def _copy_trees(
    trees: tl.tensor,
    outs: tl.tensor,
    num_tokens: tl.tensor,
    num_all: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """What a row has so far, in rows of num_all tokens in place of num_tokens."""
    ids, parents, logprobs, sees = trees
    ids_out, parents_out, logprobs_out, sees_out = outs
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    is_old = tokens < num_tokens
    source, target = row * num_tokens + tokens, row * num_all + tokens
    tl.store(ids_out + target, tl.load(ids + source, mask=is_old), mask=is_old)
    tl.store(parents_out + target, tl.load(parents + source, mask=is_old), mask=is_old)
    tl.store(logprobs_out + target, tl.load(logprobs + source, mask=is_old), mask=is_old)
    is_both = is_old[:, None] & is_old[None, :]
    old = tl.load(sees + source[:, None] * num_tokens + tokens[None, :], mask=is_both, other=0)
    is_cell = is_old[:, None] & (tokens < num_all)[None, :]
    tl.store(sees_out + target[:, None] * num_all + tokens[None, :], old, mask=is_cell)


copy_trees = triton.jit(_copy_trees)


def _join_parts(  # noqa: PLR0913
    peaks: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    before: tl.tensor,
    num_parents: tl.tensor,
    num_parts: tl.tensor,
    num_kept: tl.tensor,
    num_newest: tl.tensor,
    HAS_WIDTHS: tl.constexpr,  # noqa: N803
    BLOCK_NEWEST: tl.constexpr,  # noqa: N803
    BLOCK_PARTS: tl.constexpr,  # noqa: N803
    BLOCK_FOUND: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """What was found behind a row's newest tokens, a line each: how likely it is with all before,
    -inf where that is no number; and its kind, by which numbers come first. before: of these
    tokens. With HAS_WIDTHS only the first num_parents of them have continuations of the row's own,
    which all come before others."""
    newest, found = tl.arange(0, BLOCK_NEWEST), tl.arange(0, BLOCK_FOUND)
    parts, num_found = tl.arange(0, BLOCK_PARTS), num_parts * num_kept
    is_newest, lines = newest < num_newest, tl.program_id(0) * num_newest + newest
    is_part = is_newest[:, None] & (parts < num_parts)[None, :]
    sums_of = log_sums(peaks, sums, lines[:, None] * num_parts + parts[None, :], is_part)
    is_found = is_newest[:, None] & (found < num_found)[None, :]
    at = lines[:, None] * num_found + found[None, :]
    value = tl.load(values + at, mask=is_found, other=0.0).to(tl.float64)
    joint = before[:, None] + (value - sums_of.to(tl.float64)[:, None])
    kind = tl.where(joint == joint, _NUMBER, _NO_NUMBER)
    if HAS_WIDTHS:
        is_barren = (newest >= num_parents)[:, None] & (found >= 0)[None, :]
        kind = tl.where(is_barren, _NO_NUMBER, _NUMBER)
    is_token = tl.load(columns + at, mask=is_found, other=-1) >= 0
    kind = tl.where(is_token, kind, _NOTHING)
    return tl.where((joint == joint) & (kind == _NUMBER), joint, -float("inf")), kind


join_parts = triton.jit(_join_parts)


def _choose(  # noqa: PLR0913
    joint: tl.tensor,
    kind: tl.tensor,
    columns: tl.tensor,
    names: tl.tensor,
    sees: tl.tensor,
    outs: tl.tensor,
    sizes: tl.tensor,
    HAS_NAMES: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """In every turn the likeliest that is left joins a row's tree, the first of equals. joint and
    kind: as of join_parts. outs: as copy_trees fills them. sizes: how many were found behind a
    token, tokens so far, newest of these, and drafts to choose."""
    ids_out, parents_out, logprobs_out, sees_out = outs
    num_found, num_tokens, num_newest, width = sizes
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK_TOKENS)
    num_all, first = num_tokens + width, num_tokens - num_newest
    found, newest = tl.arange(0, joint.shape[1]), tl.arange(0, joint.shape[0])
    index = newest[:, None] * joint.shape[1] + found[None, :]
    for rank in range(width):
        best_kind = tl.max(kind)
        is_kind = kind == best_kind
        best = tl.max(tl.where(is_kind, joint, -float("inf")))
        chosen = tl.min(tl.where(is_kind & (joint == best), index, _HIGHEST))
        parent, place = chosen // joint.shape[1], chosen % joint.shape[1]
        column = tl.load(columns + (row * num_newest + parent) * num_found + place)
        token_id = tl.load(names + column) if HAS_NAMES else column.to(tl.int64)
        target = row * num_all + num_tokens + rank
        tl.store(ids_out + target, token_id)
        tl.store(parents_out + target, (first + parent).to(tl.int64))
        tl.store(logprobs_out + target, tl.where(best_kind == _NUMBER, best, float("nan")))
        path = sees + (row * num_tokens + first + parent) * num_tokens + tokens
        seen = tl.load(path, mask=tokens < num_tokens, other=0)
        seen = tl.where(tokens == num_tokens + rank, 1, seen).to(tl.uint8)
        tl.store(sees_out + target * num_all + tokens, seen, mask=tokens < num_all)
        kind = tl.where(index == chosen, _NOTHING, kind)


choose = triton.jit(_choose)


def _append_level(  # noqa: PLR0913
    peaks: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    names: tl.tensor,
    own_widths: tl.tensor,
    ids: tl.tensor,
    parents: tl.tensor,
    logprobs: tl.tensor,
    sees: tl.tensor,
    ids_out: tl.tensor,
    parents_out: tl.tensor,
    logprobs_out: tl.tensor,
    sees_out: tl.tensor,
    widths_stride: tl.tensor,
    num_parts: tl.tensor,
    num_kept: tl.tensor,
    num_tokens: tl.tensor,
    num_newest: tl.tensor,
    width: tl.tensor,
    HAS_NAMES: tl.constexpr,  # noqa: N803
    HAS_WIDTHS: tl.constexpr,  # noqa: N803
    BLOCK_NEWEST: tl.constexpr,  # noqa: N803
    BLOCK_PARTS: tl.constexpr,  # noqa: N803
    BLOCK_FOUND: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program: a row of trees."""
    row, newest = tl.program_id(0), tl.arange(0, BLOCK_NEWEST)
    begin_dependent(IS_DEPENDENT)
    at = logprobs + row * num_tokens + num_tokens - num_newest + newest
    before = tl.load(at, mask=newest < num_newest, other=0.0)
    num_parents = num_newest
    if HAS_WIDTHS:
        num_parents = tl.load(own_widths + row * widths_stride).to(tl.int32)
    joint, kind = join_parts(
        peaks, sums, values, columns, before, num_parents, num_parts, num_kept, num_newest,
        HAS_WIDTHS, BLOCK_NEWEST, BLOCK_PARTS, BLOCK_FOUND,
    )  # fmt: skip
    outs = (ids_out, parents_out, logprobs_out, sees_out)
    copy_trees((ids, parents, logprobs, sees), outs, num_tokens, num_tokens + width, BLOCK_TOKENS)
    sizes = (num_parts * num_kept, num_tokens, num_newest, width)
    choose(joint, kind, columns, names, sees, outs, sizes, HAS_NAMES, BLOCK_TOKENS)


_append_level_kernel = triton.jit(
    _append_level,
    do_not_specialize=(
        "widths_stride", "num_parts", "num_kept", "num_tokens", "num_newest", "width",
    ),
    do_not_specialize_on_alignment=("own_widths", "ids", "parents", "logprobs", "sees"),
)  # fmt: skip


class _Found(NamedTuple):
    """Of lines of logits, in parts: float32 (lines, parts) maxima and sums of exponentials beside
    them; values float32 and columns int32 (lines, parts, kept) of the likeliest tokens."""

    peaks: torch.Tensor
    sums: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor


def grow_level(
    trees: DeviceTrees,
    logits: torch.Tensor,
    width: int,
    names: torch.Tensor | None = None,
    num_parents: torch.Tensor | None = None,
) -> DeviceTrees:
    """workers.speculation.tree_kernels.GrowLevel. Elements of a row of logits lie side by side."""
    found = _find(logits, width)
    grown = _larger(trees, width)
    _, num_parts, num_kept = found.values.shape
    sizes = trees.num_newest, num_parts, num_parts * num_kept
    blocks = [next_power_of_2(one) for one in sizes]
    is_dependent = dependent_launch(logits)
    _append_level_kernel[(len(trees.ids),)](
        *found,
        found.columns if names is None else names,
        found.columns if num_parents is None else num_parents,
        *_pointers(trees),
        *_pointers(grown),
        0 if num_parents is None else num_parents.stride(0),
        num_parts,
        num_kept,
        trees.ids.shape[1],
        trees.num_newest,
        width,
        HAS_NAMES=names is not None,
        HAS_WIDTHS=num_parents is not None,
        BLOCK_NEWEST=blocks[0],
        BLOCK_PARTS=blocks[1],
        BLOCK_FOUND=blocks[2],
        BLOCK_TOKENS=next_power_of_2(grown.ids.shape[1]),
        IS_DEPENDENT=is_dependent,
        num_warps=1 if blocks[0] * blocks[2] <= _MAX_OF_ONE_WARP else 8,
        launch_pdl=is_dependent,
    )
    return grown


def _find(logits: torch.Tensor, width: int) -> _Found:
    """The likeliest width of each part, or all that it has."""
    (num_lines, num_columns), device = logits.shape, logits.device
    block = _PART_TOKENS if num_columns <= _FEW_TOKENS else 2 * _PART_TOKENS
    size = num_lines, triton.cdiv(num_columns, block)
    peaks, sums = torch.empty((2, *size), device=device)
    values = torch.empty((*size, min(width, block)), device=device)
    found = _Found(peaks, sums, values, torch.empty_like(values, dtype=torch.int32))
    is_dependent = dependent_launch(logits)
    _keep_likeliest_kernel[size](
        logits,
        *found,
        logits.stride(0),
        num_columns,
        values.shape[2],
        BLOCK=block,
        IS_DEPENDENT=is_dependent,
        num_warps=8,
        launch_pdl=is_dependent,
    )
    return found


def _pointers(trees: DeviceTrees) -> tuple[torch.Tensor, ...]:
    """In the order of the kernel's arguments."""
    return trees.ids, trees.parents, trees.logprobs, trees.sees.view(torch.uint8)


def _larger(trees: DeviceTrees, width: int) -> DeviceTrees:
    """Of as many rows, with nothing in it."""
    n, num_tokens = trees.parents.shape
    num_all = num_tokens + width
    return DeviceTrees(
        trees.ids.new_empty((n, num_all)),
        trees.parents.new_empty((n, num_all)),
        trees.logprobs.new_empty((n, num_all)),
        trees.sees.new_empty((n, num_all, num_all)),
        width,
    )
