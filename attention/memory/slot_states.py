"""What layers keep of a request as a whole: convolution and recurrent states, one entry a slot.

A state is as large after a million tokens as after one. It belongs to a slot of the running table,
not to pages: whoever has the slot owns it, and a request's first token begins from none, so that
nothing of a slot's previous owner is ever read. Beside the slots stand snapshots: states as they
were after some tokens of some request, from which another one may go on. Knows no request, no
model, and not what a snapshot is of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state, without the dimension of slots."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateEntry:
    """What one module of a layer keeps of a request."""

    tensors: tuple[StateTensor, ...]

    @property
    def bytes_per_slot(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


class SnapshotOfRow(NamedTuple):
    """Once the step's row has computed num_tokens of its new tokens, at least one, its state goes
    to snapshot."""

    row: int
    num_tokens: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class _StagedState:
    """States that the step under way has made, not yet those of their places."""

    entry: int
    places: torch.Tensor  # int64 (rows,)
    tensors: tuple[torch.Tensor, ...]  # each (rows, *shape)
    num_snapshots: int  # of the rows


class SlotStates:
    """The states of num_slots slots and num_snapshots snapshots, in the order of entries.

    A step reads what earlier steps committed and stages what it makes. Only commit() changes what
    was made before: a launch that fails in the middle leaves every state as it was, and can be
    repeated. A captured step, which is replayed whole, writes at once. No method waits for the
    device.
    """

    def __init__(
        self,
        entries: Sequence[StateEntry],
        num_slots: int,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        self._num_slots = num_slots
        self.num_snapshots = num_snapshots
        # Snapshots stand behind the slots.
        num_places = num_slots + num_snapshots
        self._tensors = [
            tuple(
                torch.zeros((num_places, *tensor.shape), dtype=tensor.dtype, device=device)
                for tensor in entry.tensors
            )
            for entry in entries
        ]
        self._staged: list[_StagedState] = []
        self._wanted: tuple[SnapshotOfRow, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self._tensors for tensor in entry)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Of all entries, slots and snapshots."""
        return tuple(tensor for entry in self._tensors for tensor in entry)

    def read(self, entry: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of what slots int64 (rows,) hold: each (rows, *shape)."""
        return tuple(tensor.index_select(0, slots) for tensor in self._tensors[entry])

    @property
    def wanted_snapshots(self) -> tuple[SnapshotOfRow, ...]:
        """What the step under way has to stage beside the states of its rows' slots."""
        return self._wanted

    def begin_step(self, wanted: Sequence[SnapshotOfRow] = ()) -> None:
        """Forget what was staged and not committed; wanted: of the step's rows."""
        self._staged.clear()
        self._wanted = tuple(wanted)

    def restore(self, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        """Each of slots int64 (n,) goes on from one of snapshots int64 (n,). Can be repeated."""
        self._copy(self._num_slots + snapshots, slots)

    def save(self, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        """What slots int64 (n,) hold goes to snapshots int64 (n,): behind a step that has written
        its states at once."""
        self._copy(slots, self._num_slots + snapshots)

    def write(self, entry: int, slots: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """What slots hold from here on, in a step that cannot fail half way: a captured one, whose
        padding rows may share a slot. Raises ValueError for other shapes."""
        self._put(self._checked(entry, slots, tensors, num_snapshots=0))

    def stage(self, entry: int, slots: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """What slots shall hold once the step has succeeded. Raises ValueError for other shapes."""
        self._staged.append(self._checked(entry, slots, tensors, num_snapshots=0))

    def stage_snapshots(
        self, entry: int, snapshots: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        """As stage(), of snapshots int64 (rows,)."""
        places = self._num_slots + snapshots
        self._staged.append(self._checked(entry, places, tensors, num_snapshots=len(places)))

    def commit(self) -> None:
        """Make what was staged the states of their places.

        Raises RuntimeError, and changes nothing, when a wanted snapshot is not among it.
        """
        self._check_snapshots()
        for staged in self._staged:
            self._put(staged)
        self._staged.clear()

    def _put(self, staged: _StagedState) -> None:
        for kept, made in zip(self._tensors[staged.entry], staged.tensors, strict=True):
            kept.index_copy_(0, staged.places, made.to(kept.dtype))

    def _copy(self, from_places: torch.Tensor, to_places: torch.Tensor) -> None:
        for entry in self._tensors:
            for tensor in entry:
                tensor.index_copy_(0, to_places, tensor.index_select(0, from_places))

    def _check_snapshots(self) -> None:
        if not self._wanted:
            return
        num_wanted = len(self._wanted) * len(self._tensors)
        num_staged = sum(staged.num_snapshots for staged in self._staged)
        if num_staged != num_wanted:
            raise RuntimeError(f"{num_staged} states of snapshots are staged, not {num_wanted}")

    def _checked(
        self,
        entry: int,
        places: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        num_snapshots: int,
    ) -> _StagedState:
        kept = self._tensors[entry]
        wanted = [(len(places), *tensor.shape[1:]) for tensor in kept]
        given = [tuple(tensor.shape) for tensor in tensors]
        if wanted != given:
            raise ValueError(f"states of entry {entry} have shapes {given}, not {wanted}")
        return _StagedState(entry, places, tuple(tensors), num_snapshots)
