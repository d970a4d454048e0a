"""Host memory that a decode step's kernels read their rows from and write their tokens to.

A ring of slots, page-locked on CUDA: the device takes them by turns, so that no step needs a copy
before or behind it, and the host may fill the next ones while the device still reads the last.
Knows no plan.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.graphs.decode_step import HOST_ROW_FIELDS, StepRing

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

    def __init__(self, ring: StepRing, index: int, mark: StreamMark) -> None:
        self.index = index
        self.rows: npt.NDArray[np.int32] = ring.rows[index, :HOST_ROW_FIELDS].numpy()
        self.sampled: npt.NDArray[np.int32] = ring.sampled[index, :-1].numpy()
        self._asked: npt.NDArray[np.int32] = ring.rows[index, HOST_ROW_FIELDS, :1].numpy()
        self._answered: npt.NDArray[np.int32] = ring.sampled[index, -1:].numpy()
        self._mark = mark
        self._is_used = False

    def number(self, step: int) -> None:
        """Name the step whose rows are being filled in; any int32 that no recent one had."""
        self._asked[0] = step

    def mark_used(self) -> None:
        """The stream has no further access to this slot."""
        self._mark.record()
        self._is_used = True

    def check_answered(self) -> None:
        """Raise RuntimeError unless sampled is the answer to rows. The device has passed it."""
        if self._answered[0] != self._asked[0]:
            raise RuntimeError(
                f"slot {self.index} was filled for step {self._asked[0]}, "
                f"but the device answered step {self._answered[0]}"
            )

    def wait_until_free(self) -> None:
        if self._is_used and not self._mark.query():
            self._mark.synchronize()
        self._is_used = False


class StagingRing:
    """Slots by turns, on the host as on the device. take waits only if the host is
    NUM_STAGING_SLOTS steps ahead of the device; whoever reads a slot's tokens does so before that
    many further steps are staged."""

    def __init__(self, ring: StepRing, marks: list[StreamMark]) -> None:
        self.ring = ring
        self._slots = [StagingSlot(ring, index, mark) for index, mark in enumerate(marks)]
        self._num_taken = 0

    @classmethod
    def on_host(cls, max_rows: int) -> "StagingRing":
        ring = StepRing.allocate(NUM_STAGING_SLOTS, max_rows, torch.device("cpu"))
        return cls(ring, [HostMark() for _ in range(NUM_STAGING_SLOTS)])

    @classmethod
    def pinned(cls, max_rows: int, device: torch.device) -> "StagingRing":
        ring = StepRing.allocate(NUM_STAGING_SLOTS, max_rows, device)
        new_event = torch.cuda.Event
        return cls(ring, [new_event() for _ in range(NUM_STAGING_SLOTS)])  # type: ignore[no-untyped-call]

    def take(self) -> StagingSlot:
        slot = self._slots[self._num_taken % NUM_STAGING_SLOTS]
        slot.wait_until_free()
        slot.number(self._num_taken % (1 << 30))
        self._num_taken += 1
        return slot

    def point_device_at(self, slot: StagingSlot) -> None:
        """The next step on the stream reads this slot, whatever ran before."""
        self.ring.next_slot.fill_(slot.index)

    def point_device_at_next(self) -> None:
        """The next step on the stream reads the slot that take gives next."""
        self.ring.next_slot.fill_(self._num_taken % NUM_STAGING_SLOTS)
