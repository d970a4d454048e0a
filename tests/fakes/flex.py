"""FlexAttention's compiled kernel in plain torch: what is on no tile's list of pages is not read.

torch runs flex_attention unfused over the whole pool on CPU and never looks at the lists.
"""

from __future__ import annotations

import torch

from attention.kernels.flex_kernel import FlexShape, mask_of
from attention.kernels.flex_pages import SeenPages


class ListedPagesKernel:
    """As FlexKernel, in float64, tile by tile."""

    is_compiled = False

    def __init__(self, shape: FlexShape) -> None:
        self.shape = shape

    def attend(
        self,
        q: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        seen: SeenPages,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = self.shape
        masked = [positions, seen.pairs] + ([] if seen.cells is None else [seen.cells])
        sees = mask_of(shape)(shape.page_size, *masked)
        assert q.shape[2] == seen.num_pages.shape[2] * shape.tile_rows == seen.pairs.shape[1]
        outs, lses = [], []
        for tile, own in enumerate(q[0].double().split(shape.tile_rows, dim=1)):
            pages = seen.pages[0, 0, tile, : int(seen.num_pages[0, 0, tile])].long()
            keys = (pages[:, None] * shape.page_size + torch.arange(shape.page_size)).flatten()
            pairs = torch.arange(shape.tile_rows)[:, None] + tile * shape.tile_rows
            nothing = torch.zeros((), dtype=torch.int64)
            hidden = ~sees(nothing, nothing, pairs, keys[None])
            out, lse = self._attend_tile(own, *(kv[pages].flatten(0, 1) for kv in kv_pages), hidden)
            outs.append(out)
            lses.append(lse)
        lse = torch.cat(lses, 1).unsqueeze(0).float() if shape.has_lse else None
        return torch.cat(outs, 1).unsqueeze(0).to(q.dtype), lse

    def _attend_tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q (kv_heads, rows, dim), k and v (keys, kv_heads, dim), hidden (rows, keys)."""
        scores = torch.einsum("hrd,khd->hrk", q, k.double()) * self.shape.scaling
        if self.shape.logit_cap > 0.0:
            scores = self.shape.logit_cap * torch.tanh(scores / self.shape.logit_cap)
        scores.masked_fill_(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=2)
        weights = torch.exp(scores - lse.unsqueeze(2)).nan_to_num(nan=0.0)
        return torch.einsum("hrk,khd->hrd", weights, v.double()), lse
