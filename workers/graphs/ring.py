"""Host memory that a decode step's kernels read their rows from and write their tokens to.

A ring of slots, page-locked on CUDA: the device takes them by turns, so that no step needs a copy
before or behind it, and the host may fill the next ones while the device still reads the last.
Knows no plan's content.

Why no tokens are lost: a slot is filled again at the NUM_STAGING_SLOTS-th take after its own. A
plan takes one slot at most: it replays a graph, or one is captured behind it whose trial run takes
a slot, never both. With max_plans under way, a plan's tokens are read before max_plans further ones
are launched, so that max_plans slots suffice. An idle engine captures when no plan is under way.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.graphs.decode_step import StepRing

NUM_STAGING_SLOTS = 4
"""More than suffice for an engine: a rank whose tokens nobody reads may launch so many steps ahead
of its device before it waits."""


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
    """rows: int32 (num_fields of the ring, max_rows); sampled: int32 (max_rows,). Host arrays.
    device_sampled: sampled as a tensor that the device can read where it is.

    step: the number of the step whose rows these are.
    """

    def __init__(self, ring: StepRing, index: int, mark: StreamMark) -> None:
        self.index = index
        self.rows: npt.NDArray[np.int32] = ring.rows[index, : ring.num_fields].numpy()
        self.device_sampled = ring.sampled[index, :-1]
        self.sampled: npt.NDArray[np.int32] = self.device_sampled.numpy()
        self._asked: npt.NDArray[np.int32] = ring.rows[index, ring.num_fields, :1].numpy()
        self._answered: npt.NDArray[np.int32] = ring.sampled[index, -1:].numpy()
        self._mark = mark
        self._is_used = False
        self.step = 0

    def number(self, step: int) -> None:
        """Name the step whose rows are being filled in: an int32 that no recent one had, not 0."""
        self.step = step
        self._asked[0] = step

    def mark_used(self) -> None:
        """The stream has no further access to this slot."""
        self._mark.record()
        self._is_used = True

    def check_answered(self, step: int) -> None:
        """Raise RuntimeError unless sampled is the answer to the step. The device has passed it."""
        if not self.step == self._answered[0] == step:
            raise RuntimeError(
                f"slot {self.index} was read for step {step} and filled for step {self.step}, "
                f"the device answered step {self._answered[0]}"
            )

    def wait_until_free(self) -> None:
        if self._is_used and not self._mark.query():
            self._mark.synchronize()
        self._is_used = False


class StagingRing:
    """Slots by turns, on the host as on the device. take waits only if the host is
    NUM_STAGING_SLOTS steps ahead of the device.

    max_plans: the most that are launched and not read, the one being launched included. Raises
    ValueError when there are fewer slots than that.
    """

    def __init__(self, ring: StepRing, marks: list[StreamMark], max_plans: int) -> None:
        if len(marks) < max_plans:
            raise ValueError(f"{max_plans} plans under way need as many slots, got {len(marks)}")
        self.ring = ring
        self._slots = [StagingSlot(ring, index, mark) for index, mark in enumerate(marks)]
        self._num_taken = 0

    @classmethod
    def on_host(cls, max_rows: int, max_plans: int, num_accounts: int) -> "StagingRing":
        device = torch.device("cpu")
        ring = StepRing.allocate(NUM_STAGING_SLOTS, max_rows, device, num_accounts)
        return cls(ring, [HostMark() for _ in range(NUM_STAGING_SLOTS)], max_plans)

    @classmethod
    def pinned(
        cls, max_rows: int, max_plans: int, device: torch.device, num_accounts: int
    ) -> "StagingRing":
        ring = StepRing.allocate(NUM_STAGING_SLOTS, max_rows, device, num_accounts)
        new_event: Callable[[], StreamMark] = torch.cuda.Event
        return cls(ring, [new_event() for _ in range(NUM_STAGING_SLOTS)], max_plans)

    def take(self) -> StagingSlot:
        slot = self._slots[self._num_taken % NUM_STAGING_SLOTS]
        slot.wait_until_free()
        slot.number(1 + self._num_taken % (1 << 30))
        self._num_taken += 1
        return slot

    def point_device_at(self, slot: StagingSlot) -> None:
        """The next step on the stream reads this slot, whatever ran before."""
        self.ring.next_slot.fill_(slot.index)

    def point_device_at_next(self) -> None:
        """The next step on the stream reads the slot that take gives next."""
        self.ring.next_slot.fill_(self._num_taken % NUM_STAGING_SLOTS)
