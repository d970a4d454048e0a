"""The rows of one step on the device, in pieces of a bounded number of rows.

What samples rows takes several tensors of (rows, vocab_size), about 40 bytes an entry. No row's
arithmetic depends on another's, so that rows of many drafts are sampled a piece at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.sampling.run_drafts import DraftsBefore, RunDrafts
from workers.sampling.sampler import FilterGroups, RowGroup
from workers.sampling.slot_parameters import DENSE_FILTERS, LOOKING_BACK, HostRows, RowUse
from workers.sampling.transfer import upload

MAX_PIECE_ROWS = 256
"""One row each of as many requests as most servers run."""


def piece_ends(num_rows: int, drafts: RunDrafts | None) -> list[int]:
    """Where pieces of at most MAX_PIECE_ROWS rows end, ascending. Runs stay whole, also those that
    are longer."""
    if num_rows <= MAX_PIECE_ROWS:
        return [num_rows]
    if drafts is None:
        run_ends = np.arange(1, num_rows + 1)
    else:
        run_ends = np.append(np.flatnonzero(drafts.num_before[1:] == 0) + 1, num_rows)
    ends = [0]
    while ends[-1] < num_rows:
        own = np.searchsorted(run_ends, ends[-1], side="right")
        last = np.searchsorted(run_ends, ends[-1] + MAX_PIECE_ROWS, side="right") - 1
        ends.append(int(run_ends[max(own, last)]))
    return ends[1:]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """HostRows on the device. drafts: before the rows of uses that look at earlier tokens."""

    slots: Tensor
    noise_keys: Tensor
    groups: dict[RowUse, RowGroup]
    drafts: dict[RowUse, tuple[DraftsBefore, ...]]

    @classmethod
    def of(
        cls, host: HostRows, device: torch.device, start: int, drafts: RunDrafts | None
    ) -> "DeviceRows":
        """Of the step's rows from start on, whole runs. drafts: of all of the step's."""
        slots, noise_keys, *indices = upload(
            [host.slots, host.noise_keys, *host.rows.values()], device
        )
        num_dense = len(host.rows.get(RowUse.DENSE, ()))
        groups = {
            use: RowGroup(rows, len(rows) == (num_dense if use in DENSE_FILTERS else len(slots)))
            for use, rows in zip(host.rows, indices, strict=True)
        }
        before = {}
        if drafts is not None:
            uses = [use for use in LOOKING_BACK if use in host.rows]
            before = {use: drafts.before(start + host.rows[use], device) for use in uses}
        return cls(slots, noise_keys, groups, before)

    def drafts_of(self, use: RowUse) -> tuple[DraftsBefore, ...]:
        return self.drafts.get(use, ())

    def filter_groups(self) -> FilterGroups:
        return FilterGroups(
            min_p=self.groups.get(RowUse.MIN_P),
            top_k=self.groups.get(RowUse.TOP_K),
            top_p=self.groups.get(RowUse.TOP_P),
        )
