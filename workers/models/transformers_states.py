"""Modules of transformers that keep a state, run over rows of a flat batch, each from its slot's.

The model's code gets a SlotCache as its cache. A module that keeps a state finds the step's call in
there; for each group of rows it is given a cache of transformers' own kind, filled with what their
slots hold, and what it leaves in there is staged for the slots. Knows no weights and no particular
architecture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from attention import ForwardBatch
from attention.memory.slot_states import SlotStates
from workers.errors import ModelLoadError
from workers.models.transformers_state_rows import StatePiece, StateRows, state_rows

State = tuple[torch.Tensor, ...]
TakeRows = Callable[[torch.Tensor], torch.Tensor]
"""Of what a flat batch has for each token, (1, num_tokens, ...), that of some rows of equal length,
(rows, length, ...)."""


class StateCall(Protocol):
    """What stands behind every module with a state during one forward pass."""

    def run(self, module: "StateModule", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for all tokens of the flat batch."""


class SlotCache(DynamicCache):
    """The cache of a flat batch: attention keeps nothing in it, modules with a state their call."""

    def __init__(self, config: PreTrainedConfig, state_call: StateCall | None = None) -> None:
        super().__init__(config=config)
        self.state_call = state_call

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are: RadixAttention keeps them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """None of the tokens that came before are in here; their positions are given."""
        return 0


class RowsCache(Cache):
    """What one module of one layer keeps of some rows: no state, or the one that is given.

    A state is the module's tensors in the order of places, each (rows, ...).
    """

    def __init__(self, module: "StateModule", state: State | None) -> None:
        self._layer = LinearAttentionLayer(number_of_states=module.num_states)
        # At the layer's own place; nobody asks for the others.
        super().__init__(layers=[self._layer] * (module.layer_id + 1))
        self.linear_state: torch.Tensor | None = None
        if state is not None:
            for place, tensor in zip(module.places, state, strict=True):
                self._put(place, tensor)

    def _put(self, place: tuple[str, int], tensor: torch.Tensor) -> None:
        kind, index = place
        layer = self._layer
        if kind == "linear":
            self.linear_state = tensor
        elif kind == "conv":
            layer.conv_states[index] = tensor
            layer.is_conv_states_initialized[index] = True
            layer.has_previous_state[index] = True
            layer.conv_kernel_size[index] = tensor.shape[-1]
            layer.dtype, layer.device = tensor.dtype, tensor.device  # type: ignore[assignment]
        else:
            layer.recurrent_states[index] = tensor
            layer.is_recurrent_states_initialized[index] = True

    def kept(self) -> dict[tuple[str, int], torch.Tensor]:
        """What the module has left in here, by place."""
        by_kind = {
            "conv": self._layer.conv_states,
            "recurrent": self._layer.recurrent_states,
            "linear": {0: self.linear_state},
        }
        return {
            (kind, index): tensor
            for kind, tensors in by_kind.items()
            for index, tensor in tensors.items()
            if tensor is not None
        }

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name for its state."""
        return self.linear_state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.linear_state = linear_cache


class StateModule:
    """A module's forward, over rows. Put in its place by install().

    layer_id: as the module names its layer to the cache. num_states: of the layer, this module's
    and others'. index: its entry in SlotStates. places: where in a cache its state lies.
    continues_many: whether it can take several tokens on top of a state in one call.
    """

    def __init__(self, module: nn.Module, index: int, layer_id: int, num_states: int) -> None:
        self.name = type(module).__name__
        self.kind = type(module)
        self.index = index
        self.layer_id = layer_id
        self.num_states = num_states
        self.places: tuple[tuple[str, int], ...] = ()
        self.continues_many = True
        self._module = module
        self._forward = module.forward

    def install(self) -> None:
        """Let the module's calls come here."""
        self._module.forward = self._run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        caches = [v for v in (*args, *kwargs.values()) if isinstance(v, SlotCache)]
        if len(caches) != 1 or caches[0].state_call is None:
            raise ModelLoadError(f"{self.name} does not get its model's cache")
        return caches[0].state_call.run(self, args, kwargs)

    def run_rows(self, call: "FlatCall", take: TakeRows, cache: Cache) -> Any:
        """Its output for rows of equal length."""
        return self._forward(
            *(call.of_rows(value, take, cache) for value in call.args),
            **{name: call.of_rows(value, take, cache) for name, value in call.kwargs.items()},
        )

    def kept_in(self, cache: "RowsCache") -> State:
        """The state that it has left there."""
        kept = cache.kept()
        return tuple(kept[place] for place in self.places)


@dataclass(frozen=True, slots=True)
class FlatCall:
    """A module's arguments for a flat batch of num_tokens."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_tokens: int

    def of_rows(self, value: Any, take: TakeRows, cache: Cache) -> Any:
        """One argument, as it is for some rows with their cache."""
        if isinstance(value, SlotCache):
            return cache
        if isinstance(value, torch.Tensor) and value.shape[:2] == (1, self.num_tokens):
            return take(value)
        if isinstance(value, tuple | list):
            return type(value)(self.of_rows(part, take, cache) for part in value)
        return value


def rows_at(tokens: torch.Tensor) -> TakeRows:
    """tokens: int64 (rows, length), places in the flat batch."""
    return lambda of_tokens: of_tokens[0, tokens]


def joined(parts: Sequence[tuple[torch.Tensor, Any]], num_tokens: int) -> Any:
    """Outputs of rows put together as (1, num_tokens, ...). parts: (tokens, output of the rows).

    What an output has that is not of tokens, as MiniMax's state, is None.
    """
    tokens, first = parts[0]
    if isinstance(first, tuple):
        return tuple(
            joined([(tokens, output[i]) for tokens, output in parts], num_tokens)
            for i in range(len(first))
        )
    if not isinstance(first, torch.Tensor):
        return None
    if any(output.shape[:2] != tokens.shape for tokens, output in parts):
        return None
    flat = first.new_empty((num_tokens, *first.shape[2:]))
    for tokens, output in parts:
        flat[tokens.flatten()] = output.flatten(0, 1)
    return flat.unsqueeze(0)


class StepStates:
    """One step: every module with a state continues each row from its slot's."""

    def __init__(self, states: SlotStates, batch: ForwardBatch) -> None:
        self._states = states
        self._batch = batch
        self._num_tokens = batch.num_tokens

    @cached_property
    def _groups(self) -> list[StateRows]:
        """Made for the first module that asks: a captured step has none, and this copies to the
        device."""
        return state_rows(self._batch, self._states.wanted_snapshots)

    def run(self, module: StateModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FlatCall(args, kwargs, self._num_tokens)
        parts: list[tuple[torch.Tensor, Any]] = []
        for group in self._groups:
            state = self._run_group(module, call, group, parts)
            self._states.stage(module.index, group.slots, state)
        return joined(parts, self._num_tokens)

    def _run_group(
        self,
        module: StateModule,
        call: FlatCall,
        group: StateRows,
        parts: list[tuple[torch.Tensor, Any]],
    ) -> State:
        """The rows' state after the step. parts: gets what comes out."""
        first, *others = group.pieces
        before = None if group.is_fresh else self._states.read(module.index, group.slots)
        state = self._run_piece(module, call, first, before, parts)
        for piece in others:
            state = self._run_piece(module, call, piece, state, parts)
        return state

    def _run_piece(
        self,
        module: StateModule,
        call: FlatCall,
        piece: StatePiece,
        state: State | None,
        parts: list[tuple[torch.Tensor, Any]],
    ) -> State:
        """As _run_group, of one piece; state: before it."""
        cache = RowsCache(module, state)
        at_once = state is None or module.continues_many
        for tokens in (piece.tokens,) if at_once else torch.split(piece.tokens, 1, dim=1):
            parts.append((tokens, module.run_rows(call, rows_at(tokens), cache)))
        made = module.kept_in(cache)
        if len(piece.rows):
            # Copies: what comes after the piece may change the state in its place.
            saved = [tensor.index_select(0, piece.rows) for tensor in made]
            self._states.stage_snapshots(module.index, piece.snapshots, saved)
        return made
