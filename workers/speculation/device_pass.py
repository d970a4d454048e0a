"""Passes of a drafter on a rank's device, over KV memory of its own at the target's cache indices.

Knows lengths and places; no model. Nothing here waits for the device.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.visibility import CAUSAL, Visibility
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray
from workers.speculation.runs import ranges


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows that bring num_new tokens behind prefix_lens ones, as the drafter counts them, int32
    (n,) each; out_cache_loc: int32 (num tokens,), where they go. depths: int32 (num tokens,), how
    many of its row stand before each on its path; None where they stand one behind the other."""

    slots: IntArray
    prefix_lens: IntArray
    num_new: IntArray
    out_cache_loc: IntArray
    depths: IntArray | None = None

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 (num tokens,)."""
        if self.depths is None:
            return ranges(self.prefix_lens, self.num_new)
        return np.repeat(self.prefix_lens, self.num_new).astype(np.int64) + self.depths


class DevicePasses:
    """Makes the batches of one drafter. backend: over a pool with the target's cache indices, and
    a table in which the rows' tokens stand."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def prepare(
        self, rows: PassRows, input_ids: torch.Tensor, visibility: Visibility = CAUSAL
    ) -> ForwardBatch:
        """input_ids: int64 (num tokens,) on the device. The backend is ready for the batch."""
        seq_lens = rows.prefix_lens + rows.num_new
        slots, positions, locs, lens, num_new, prefix_lens = upload(
            [
                rows.slots.astype(np.int64),
                rows.positions,
                rows.out_cache_loc.astype(np.int64),
                seq_lens,
                rows.num_new,
                rows.prefix_lens,
            ],
            input_ids.device,
        )
        is_decode = bool((rows.num_new == 1).all())
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            batch_size=len(rows.slots),
            num_tokens=len(rows.out_cache_loc),
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=slots,
            seq_lens=lens,
            extend_seq_lens=num_new,
            extend_prefix_lens=prefix_lens,
            out_cache_loc=locs,
            seq_lens_cpu=seq_lens,
            extend_seq_lens_cpu=rows.num_new,
            extend_prefix_lens_cpu=rows.prefix_lens,
            attn_backend=self._backend,
            visibility=visibility,
        )
        self._backend.init_forward_metadata(batch)
        return batch
