"""FlexAttention over a paged pool: one compiled kernel a shape, whatever the step.

torch compiles flex_attention anew for each size that it takes for fixed. Here every size that steps
or pools differ in is marked as one that varies, and each kernel has a code object of its own, so
that its compilations are counted for itself: one for a shape. On CPU the same masks run unfused,
over the whole pool: for tests. Knows no batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from attention.kernels.flex_pages import SeenPages
from attention.kernels.flex_tiles import min_tiles

_MAX_PROGRAM_ROWS = 64
_MAX_PROGRAM_KEYS = 64
_WIDE_HEAD_DIM = 128
_KEYS_OF_WIDE_HEADS = 32
_NUM_STAGES = 2
_NUM_WARPS = 4

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Compiler = Callable[[Attend], Attend]


@dataclass(frozen=True, slots=True)
class FlexShape:
    """What a kernel is compiled for. logit_cap: 0 for none. is_tree: masks have cells. has_lse: the
    log-sum-exp of the scores is wanted, too."""

    tile_rows: int
    page_size: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scaling: float
    logit_cap: float
    is_tree: bool
    has_lse: bool

    @property
    def kernel_options(self) -> FlexKernelOptions:
        """What one program takes, small enough for every GPU from sm80 on: compiled for sm86, heads
        of 256 take 76 of its 99 KiB of shared memory. A page is a whole number of its keys."""
        wide = max(self.head_dim, self.v_head_dim) > _WIDE_HEAD_DIM
        most = _KEYS_OF_WIDE_HEADS if wide else _MAX_PROGRAM_KEYS
        return {
            "BLOCK_M": min(self.tile_rows, _MAX_PROGRAM_ROWS),
            "BLOCK_N": math.gcd(self.page_size, most),
            "num_stages": _NUM_STAGES,
            "num_warps": _NUM_WARPS,
            "FORCE_USE_FLEX_ATTENTION": True,
        }


class FlexKernel:
    """compiler: None runs unfused."""

    def __init__(self, shape: FlexShape, compiler: Compiler | None) -> None:
        self.shape = shape
        self.is_compiled = compiler is not None
        attend = _attend_of(shape)
        self._attend = attend if compiler is None else compiler(attend)

    def compile(
        self,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        seen: SeenPages,
    ) -> None:
        """By a call whose tiles see nothing. seen: of tiles of any height."""
        shape, num_tiles = self.shape, min_tiles(self.shape.tile_rows)
        num_pairs = num_tiles * shape.tile_rows
        nothing = replace(
            seen,
            num_pages=seen.num_pages.new_zeros((1, 1, num_tiles)),
            pages=seen.pages.new_zeros((1, 1, num_tiles, seen.pages.shape[3])),
            pairs=seen.pairs.new_zeros((len(seen.pairs), num_pairs)),
        )
        q = kv_pages[0].new_zeros((1, shape.kv_heads, num_pairs, shape.head_dim))
        self.attend(q, kv_pages, positions, nothing)

    def attend(
        self,
        q: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        seen: SeenPages,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q (1, kv_heads, num_tiles * tile_rows, head_dim), kv_pages K and V (num_pages, page_size,
        kv_heads, dim), positions: AccountPages.positions -> the output (1, kv_heads, num_tiles *
        tile_rows, v_head_dim) and, where it is wanted, the log-sum-exp, float32, without its last
        dimension. Pairs that see nothing give zeros and -inf."""
        k, v = (pages.flatten(0, 1).transpose(0, 1).unsqueeze(0) for pages in kv_pages)
        tensors = [q, k, v, seen.num_pages, seen.pages, positions, seen.pairs]
        varying = list(_VARYING)
        if seen.cells is not None:
            tensors.append(seen.cells)
            varying.append((0,))
        if self.is_compiled:
            for tensor, dims in zip(tensors, varying, strict=True):
                torch._dynamo.mark_dynamic(tensor, list(dims))
        return self._attend(*tensors)


_VARYING = ((2,), (2,), (2,), (2,), (2, 3), (0, 1), (1,))
"""Dimensions of q, k, v, num_pages, pages, positions and pairs."""


@cache
def compiled_kernel(shape: FlexShape) -> FlexKernel:
    """Compiled at its first call. Only what attend marks may vary: numbers of the shape that differ
    between kernels would else become inputs, which torch cannot put into a score or a tile."""
    return FlexKernel(shape, lambda attend: torch.compile(attend, fullgraph=True, dynamic=False))


def unfused_kernel(shape: FlexShape) -> FlexKernel:
    return FlexKernel(shape, None)


def _attend_of(shape: FlexShape) -> Attend:
    page_size, cap = shape.page_size, shape.logit_cap
    block_size = (shape.tile_rows, page_size)
    options, request = shape.kernel_options, AuxRequest(lse=shape.has_lse)

    def cap_score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    score_mod = cap_score if cap > 0.0 else None
    masks = mask_of(shape)

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        num_pages: torch.Tensor,
        pages: torch.Tensor,
        *masked: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = BlockMask(
            seq_lengths=(q.shape[2], k.shape[2]),
            kv_num_blocks=num_pages,
            kv_indices=pages,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=block_size,
            mask_mod=masks(page_size, *masked),
        )
        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=mask,
            scale=shape.scaling,
            kernel_options=options,
            return_aux=request,
        )
        return out, aux.lse

    # torch counts a function's compilations by its code object, and refuses the ninth.
    attend.__code__ = attend.__code__.replace()
    return attend


Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_of(shape: FlexShape) -> Callable[..., Mask]:
    """Of a page's size, AccountPages.positions, SeenPages.pairs and, for trees, cells: a mask_mod
    whose queries are pairs and whose keys are cache indices."""
    return _tree_mask if shape.is_tree else _interval_mask


def _interval_mask(page_size: int, positions: torch.Tensor, pairs: torch.Tensor) -> Mask:
    """Of SeenPages without cells. Of a page that no tile lists, places are negative."""

    def sees(
        b: torch.Tensor, h: torch.Tensor, pair: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        place = positions[pairs[0, pair], key // page_size] * page_size + key % page_size
        is_shared = (place >= pairs[1, pair]) & (place < pairs[2, pair])
        return is_shared | ((place >= pairs[3, pair]) & (place < pairs[4, pair]))

    return sees


def _tree_mask(
    page_size: int, positions: torch.Tensor, pairs: torch.Tensor, cells: torch.Tensor
) -> Mask:
    """Of SeenPages with cells."""

    def sees(
        b: torch.Tensor, h: torch.Tensor, pair: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        place = positions[pairs[0, pair], key // page_size] * page_size + key % page_size
        prefix, num_new = pairs[2, pair], pairs[4, pair]
        is_new = (place >= prefix) & (place < prefix + num_new)
        cell = torch.where(is_new, pairs[3, pair] + place - prefix, 0)
        return (is_new & cells[cell]) | ((place >= pairs[1, pair]) & (place < prefix))

    return sees
