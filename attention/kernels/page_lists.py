"""The pages of a step's rows as one flat list, as FlashInfer reads them. Calls no kernel.

A row without keys, which pads a graph, gets one key of the dummy page, so that no softmax is over
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class PageLists:
    """Device tensors of up to max_bs rows.

    indptr: where each row's pages begin. last_page_lens: how many tokens of its last page a row
    has, at least 1. indices: page ids, row after row.
    """

    indptr: torch.Tensor  # int32 (max_bs + 1,)
    last_page_lens: torch.Tensor  # int32 (max_bs,)
    indices: torch.Tensor  # int32 (max_pages,)

    @classmethod
    def allocate(cls, max_bs: int, max_pages: int, device: torch.device) -> PageLists:
        """max_pages: of all rows together. Zeros: every page the dummy page."""
        lengths = torch.zeros(2 * max_bs + 1, dtype=torch.int32, device=device)
        return cls(
            lengths[: max_bs + 1],
            lengths[max_bs + 1 :],
            torch.zeros(max_pages, dtype=torch.int32, device=device),
        )

    @property
    def max_bs(self) -> int:
        return self.last_page_lens.shape[0]

    def first(self, num_rows: int) -> PageLists:
        """Of the first rows, as views."""
        return PageLists(self.indptr[: num_rows + 1], self.last_page_lens[:num_rows], self.indices)


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a step's rows. Host tensors, int32.

    qo_indptr (bs + 1,): where each row's new tokens begin. kv_lens (bs,): keys, at least 1.
    kv_indptr (bs + 1,), last_page_lens (bs,): as in PageLists.
    """

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_lens: torch.Tensor

    @classmethod
    def of(
        cls, seq_lens: npt.NDArray[np.int32], new_lens: npt.NDArray[np.int32], page_size: int
    ) -> HostRows:
        kv_lens = np.maximum(seq_lens, 1).astype(np.int32)
        num_pages = -(-kv_lens // page_size)
        return cls(
            torch.from_numpy(_begins(new_lens)),
            torch.from_numpy(kv_lens),
            torch.from_numpy(_begins(num_pages)),
            torch.from_numpy((kv_lens - 1) % page_size + 1),
        )

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])


def _begins(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    begins = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=begins[1:])
    return begins
