"""Host memory through which a decode step's rows go to the device and its tokens come back.

A ring of slots, page-locked on CUDA: the host may fill the next ones while the device still reads
the last. Knows no plan.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.decode_step import HOST_ROW_FIELDS

NUM_STAGING_SLOTS = 4


class StreamMark(Protocol):
    """A point on the device's stream. torch.cuda.Event is one."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class HostMark:
    """For devices whose work is done when its call returns."""

    def record(self) -> None:
        """Nothing runs behind the caller's back."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class StagingSlot:
    """rows: int32 (HOST_ROW_FIELDS, max_rows); sampled: int32 (max_rows,). Host arrays."""

    def __init__(self, max_rows: int, is_pinned: bool, mark: StreamMark) -> None:
        self._rows = torch.zeros(
            (HOST_ROW_FIELDS, max_rows), dtype=torch.int32, pin_memory=is_pinned
        )
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, pin_memory=is_pinned)
        self._mark = mark
        self._is_used = False
        self.rows: npt.NDArray[np.int32] = self._rows.numpy()
        self.sampled: npt.NDArray[np.int32] = self._sampled.numpy()

    def start_upload(self, target: torch.Tensor) -> None:
        target.copy_(self._rows, non_blocking=True)

    def start_download(self, source: torch.Tensor) -> None:
        """The last copy of a step: the slot is free again once the stream has passed it."""
        self._sampled.copy_(source, non_blocking=True)
        self.mark_used()

    def mark_used(self) -> None:
        """The stream has no further copy to or from this slot."""
        self._mark.record()
        self._is_used = True

    def wait_until_free(self) -> None:
        if self._is_used and not self._mark.query():
            self._mark.synchronize()
        self._is_used = False


class StagingRing:
    """Slots by turns. take waits only if the host is NUM_STAGING_SLOTS steps ahead of the device;
    whoever reads a slot's tokens does so before that many further steps are staged."""

    def __init__(self, slots: list[StagingSlot]) -> None:
        self._slots = slots
        self._next = 0

    @classmethod
    def on_host(cls, max_rows: int) -> "StagingRing":
        return cls([StagingSlot(max_rows, False, HostMark()) for _ in range(NUM_STAGING_SLOTS)])

    @classmethod
    def pinned(cls, max_rows: int) -> "StagingRing":
        return cls(
            [
                StagingSlot(max_rows, True, torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(NUM_STAGING_SLOTS)
            ]
        )

    def take(self) -> StagingSlot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait_until_free()
        return slot
