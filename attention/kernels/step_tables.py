"""The device tensors that paged kernels share over a step's layers. Calls no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepTables:
    """Lengths and pages of up to max_bs rows of up to max_pages pages.

    cu_seqlens_q, cu_seqlens_k: where each row's queries and keys start in a flat layout. Entries of
    page_table past a row's last page are pages that exist and mean nothing.
    """

    cache_seqlens: torch.Tensor  # int32 (max_bs,)
    cu_seqlens_q: torch.Tensor  # int32 (max_bs + 1,)
    cu_seqlens_k: torch.Tensor  # int32 (max_bs + 1,)
    page_table: torch.Tensor  # int32 (max_bs, max_pages)

    @classmethod
    def allocate(cls, max_bs: int, max_pages: int, device: torch.device) -> StepTables:
        """Zeros: no keys, and every page the dummy page."""
        lengths = torch.zeros(3 * max_bs + 2, dtype=torch.int32, device=device)
        return cls(
            cache_seqlens=lengths[:max_bs],
            cu_seqlens_q=lengths[max_bs : 2 * max_bs + 1],
            cu_seqlens_k=lengths[2 * max_bs + 1 :],
            page_table=torch.zeros((max_bs, max_pages), dtype=torch.int32, device=device),
        )

    @property
    def max_bs(self) -> int:
        return self.cache_seqlens.shape[0]
