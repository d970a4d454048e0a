"""Host memory that a decode step's kernels read their rows from and write their tokens to; and
such from which the rows of drafts are copied.

A ring of slots, page-locked on CUDA: the device takes them by turns, so that no step needs a copy
before or behind it, and the host may fill the next ones while the device still reads the last.
Knows no plan's content.

Why no tokens are lost: a slot is filled again at the NUM_STAGING_SLOTS-th take after its own. A
plan takes one slot at most: it replays a graph, or one is captured behind it whose trial run takes
a slot, never both. With max_plans under way, a plan's tokens are read before max_plans further ones
are launched, so that max_plans slots suffice. An idle engine captures when no plan is under way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

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


class _UploadSlot(NamedTuple):
    """One of a ring's, of one shape. host: what array is of."""

    array: npt.NDArray[np.int64]
    host: torch.Tensor
    on_device: torch.Tensor
    mark: StreamMark


class UploadRing:
    """Host memory, page-locked for CUDA, from which a tensor is filled by one copy that the host
    does not wait for. By turns: take waits only if the host is as many copies ahead of the device
    as there are marks."""

    def __init__(self, on_device: torch.Tensor, marks: Sequence[StreamMark]) -> None:
        """on_device: int64 (n,). marks: of its stream, not recorded."""
        size, is_cuda = (len(marks), len(on_device)), on_device.device.type == "cuda"
        self._on_device = on_device
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self._marks = marks
        self._slots: dict[tuple[int, int, int], _UploadSlot] = {}
        self._num_taken = 0
        self._taken: _UploadSlot | None = None

    @classmethod
    def onto(cls, on_device: torch.Tensor) -> Self:
        new_mark: Callable[[], StreamMark] = HostMark
        if on_device.device.type == "cuda":
            new_mark = torch.cuda.Event
        return cls(on_device, [new_mark() for _ in range(NUM_STAGING_SLOTS)])

    def take(self, num_rows: int, num_columns: int) -> npt.NDArray[np.int64]:
        """Zeros (num_rows, num_columns), to be filled in and sent."""
        index = self._num_taken % len(self._marks)
        mark = self._marks[index]
        if self._num_taken >= len(self._marks) and not mark.query():
            mark.synchronize()
        self._num_taken += 1
        key = index, num_rows, num_columns
        if key not in self._slots:
            self._slots[key] = self._slot(*key)
        self._taken = self._slots[key]
        array = self._taken.array
        array.fill(0)
        return array

    def send(self) -> torch.Tensor:
        """What was taken is on its way to the tensor's first elements, of which this is a view."""
        if self._taken is None:
            raise RuntimeError("nothing was taken that could be sent")
        _, host, on_device, mark = self._taken
        self._taken = None
        on_device.copy_(host, non_blocking=True)
        mark.record()
        return on_device

    def _slot(self, index: int, num_rows: int, num_columns: int) -> _UploadSlot:
        host, on_device = (
            own[: num_rows * num_columns].view(num_rows, num_columns)
            for own in (self._host[index], self._on_device)
        )
        return _UploadSlot(host.numpy(), host, on_device, self._marks[index])
