"""What layers keep of a request as a whole: convolution and recurrent states, one entry a slot.

A state is as large after a million tokens as after one. It belongs to a slot of the running table,
not to pages: whoever has the slot owns it, and a request's first token begins from none, so that
nothing of a slot's previous owner is ever read. Knows no request and no model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _StagedState:
    """States that the step under way has made, not yet those of their slots."""

    entry: int
    slots: torch.Tensor  # int64 (rows,)
    tensors: tuple[torch.Tensor, ...]  # each (rows, *shape)


class SlotStates:
    """The states of num_slots slots, in the order of entries.

    A step reads what earlier steps committed and stages what it makes. Only commit() changes a
    slot: a launch that fails in the middle leaves every state as it was, and can be repeated.
    """

    def __init__(self, entries: Sequence[StateEntry], num_slots: int, device: torch.device) -> None:
        self._tensors = [
            tuple(
                torch.zeros((num_slots, *tensor.shape), dtype=tensor.dtype, device=device)
                for tensor in entry.tensors
            )
            for entry in entries
        ]
        self._staged: list[_StagedState] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self._tensors for tensor in entry)

    def read(self, entry: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of what slots int64 (rows,) hold: each (rows, *shape)."""
        return tuple(tensor.index_select(0, slots) for tensor in self._tensors[entry])

    def stage(self, entry: int, slots: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """What slots shall hold once the step has succeeded. Raises ValueError for other shapes."""
        kept = self._tensors[entry]
        wanted = [(len(slots), *tensor.shape[1:]) for tensor in kept]
        given = [tuple(tensor.shape) for tensor in tensors]
        if wanted != given:
            raise ValueError(f"states of entry {entry} have shapes {given}, not {wanted}")
        self._staged.append(_StagedState(entry, slots, tuple(tensors)))

    def discard(self) -> None:
        """Forget what was staged and not committed."""
        self._staged.clear()

    def commit(self) -> None:
        """Make what was staged the states of their slots."""
        for staged in self._staged:
            for kept, made in zip(self._tensors[staged.entry], staged.tensors, strict=True):
                kept.index_copy_(0, staged.slots, made.to(kept.dtype))
        self._staged.clear()
