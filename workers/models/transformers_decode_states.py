"""Modules of transformers that keep a state, in a step of one token a row on top of a state.

Every row has a state and they come in the batch's order: each module runs once, and nothing that it
is given depends on the host. So a CUDA graph can hold the step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention.memory.slot_states import SlotStates
from workers.models.transformers_states import FlatCall, RowsCache, StateModule

PutStates = Callable[[int, torch.Tensor, Sequence[torch.Tensor]], None]
"""(entry, slots, tensors), as SlotStates.stage and SlotStates.write."""


class DecodeStates:
    """A StateCall. slots: int64 (rows,), of rows of one token each, whose states are not fresh.

    put: takes what each module has made.
    """

    def __init__(self, states: SlotStates, slots: torch.Tensor, put: PutStates) -> None:
        self._states = states
        self._slots = slots
        self._put = put

    def run(self, module: StateModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FlatCall(args, kwargs, len(self._slots))
        cache = RowsCache(module, self._states.read(module.index, self._slots))
        output = module.run_rows(call, _swapped, cache)
        self._put(module.index, self._slots, module.kept_in(cache))
        return self._flat(output)

    def _flat(self, output: Any) -> Any:
        """Of rows, as of a flat batch. What is not of tokens is None."""
        if isinstance(output, tuple):
            return tuple(self._flat(part) for part in output)
        is_of_rows = isinstance(output, torch.Tensor) and output.shape[:2] == (len(self._slots), 1)
        return _swapped(output) if is_of_rows else None


def _swapped(tokens: torch.Tensor) -> torch.Tensor:
    """(1, n, ...) as (n, 1, ...) and back."""
    return tokens.transpose(0, 1)
