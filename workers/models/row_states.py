"""Layers of native models that keep a state, run over the rows of a flat batch.

A layer says what it makes of rows of equal length on top of their states; who calls it finds the
rows, what their slots hold, and where a snapshot is wanted. Knows no layer and no weights.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch

from attention import ForwardBatch
from attention.memory.slot_states import SlotStates
from workers.models.transformers_state_rows import StatePiece, StateRows, state_rows

State = tuple[torch.Tensor, ...]
"""As the layer's StateEntry says, each (rows, ...)."""
Tokens = tuple[torch.Tensor, ...]
RunRows = Callable[[Tokens, State | None], tuple[torch.Tensor, State]]
"""(what the layer computed of each token, each (rows, length, ...), state before them, None where
the rows are fresh) -> (rows, length, ...) and the state behind them."""


class RowStates(Protocol):
    """One step, of any model with states."""

    def run(self, entry: int, tokens: Tokens, run_rows: RunRows) -> torch.Tensor:
        """entry: in SlotStates. tokens: each (n, ...), of the flat batch -> (n, ...)."""


class SteppedRows:
    """Rows of any lengths, with a state or fresh: equal ones share a call."""

    def __init__(self, states: SlotStates, batch: ForwardBatch) -> None:
        self._states, self._batch = states, batch

    @cached_property
    def _groups(self) -> list[StateRows]:
        return state_rows(self._batch, self._states.wanted_snapshots)

    def run(self, entry: int, tokens: Tokens, run_rows: RunRows) -> torch.Tensor:
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in self._groups:
            state = None if group.is_fresh else self._states.read(entry, group.slots)
            for piece in group.pieces:
                made, state = run_rows(tuple(of_all[piece.tokens] for of_all in tokens), state)
                parts.append((piece.tokens, made))
                self._keep(entry, piece, state)
            if state is not None:
                self._states.stage(entry, group.slots, state)
        return _joined(parts, self._batch.num_tokens)

    def _keep(self, entry: int, piece: StatePiece, state: State) -> None:
        """As snapshots, where any are wanted behind the piece."""
        if len(piece.rows):
            saved = [tensor.index_select(0, piece.rows) for tensor in state]
            self._states.stage_snapshots(entry, piece.snapshots, saved)


class DecodedRows:
    """Rows of one token each on top of a state, in the batch's order: a CUDA graph can hold them.

    slots: int64 (rows,). put: as SlotStates.stage or SlotStates.write.
    """

    def __init__(
        self,
        states: SlotStates,
        slots: torch.Tensor,
        put: Callable[[int, torch.Tensor, Sequence[torch.Tensor]], None],
    ) -> None:
        self._states, self._slots, self._put = states, slots, put

    def run(self, entry: int, tokens: Tokens, run_rows: RunRows) -> torch.Tensor:
        state = self._states.read(entry, self._slots)
        made, after = run_rows(tuple(one.unsqueeze(1) for one in tokens), state)
        self._put(entry, self._slots, after)
        return made.squeeze(1)


def row_states(states: SlotStates, batch: ForwardBatch) -> RowStates:
    """Of a step of these rows."""
    if batch.is_captured:
        return DecodedRows(states, batch.req_pool_indices, states.write)
    has_state = bool(batch.extend_prefix_lens_cpu.all())
    if batch.forward_mode.is_decode and has_state and not states.wanted_snapshots:
        return DecodedRows(states, batch.req_pool_indices, states.stage)
    return SteppedRows(states, batch)


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], num_tokens: int) -> torch.Tensor:
    """parts: (places of tokens in the flat batch (rows, length), what was made of them)."""
    first = parts[0][1]
    flat = first.new_empty((num_tokens, *first.shape[2:]))
    for tokens, made in parts:
        flat[tokens.flatten()] = made.flatten(0, 1)
    return flat
