"""Which modules of a model of transformers keep a state, of which shape, and how they continue it.

Nothing is read from a config: the model's code is watched while it uses its cache for one token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from attention.memory.slot_states import StateEntry, StateTensor
from workers.errors import ModelLoadError
from workers.models.transformers_states import (
    FlatCall,
    RowsCache,
    SlotCache,
    State,
    StateModule,
    joined,
    rows_at,
)

_NUM_BEFORE, _NUM_AFTER = 3, 6


class _WatchedCache(SlotCache):
    """Notes which module is at work whenever a state is asked for or given."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.at_work: list[nn.Module] = []
        self.users: dict[nn.Module, int] = {}
        self._linear: dict[int, torch.Tensor] = {}

    def _note(self, layer_id: int) -> None:
        module = self.at_work[-1]
        if self.users.setdefault(module, layer_id) != layer_id:
            raise ModelLoadError(f"{type(module).__name__} keeps the states of several layers")

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        self._note(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        self._note(layer_idx)
        return self._linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._note(layer_idx)
        self._linear[layer_idx] = linear_cache


@contextmanager
def _followed(body: nn.Module, at_work: list[nn.Module]) -> Iterator[None]:
    """at_work: the modules whose forward is running, the innermost last."""
    handles = []
    for module in body.modules():
        enter = module.register_forward_pre_hook(lambda own, _: at_work.append(own))
        leave = module.register_forward_hook(
            lambda _own, _args, _out: at_work.__delitem__(-1), always_call=True
        )
        handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def install_state_modules(
    body: nn.Module, config: PreTrainedConfig, run: Callable[[SlotCache], object]
) -> list[StateModule]:
    """Find the modules that keep a state and put StateModules in their place.

    run: runs the body for one token with the cache that it is given. config: of the text.
    """
    cache = _WatchedCache(config)
    try:
        with _followed(body, cache.at_work):
            run(cache)
    except AttributeError as error:
        if error.obj is not cache:
            raise
        raise ModelLoadError(
            f"{type(body).__name__} keeps its state in a cache of its own, with {error.name}"
        ) from error
    found = []
    for index, (module, layer_id) in enumerate(cache.users.items()):
        if module is body:
            raise ModelLoadError(f"{type(module).__name__} keeps states outside of its layers")
        num_states = getattr(cache.layers[layer_id], "number_of_states", 1)
        found.append(StateModule(module, index, layer_id, num_states))
    for state_module in found:
        state_module.install()
    return found


class FreshTokens:
    """Every token of the batch is a row of its own without a prefix."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def run(self, module: StateModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FlatCall(args, kwargs, self._num_tokens)
        tokens = torch.arange(self._num_tokens)[:, None]
        cache = RowsCache(module, None)
        output = joined([(tokens, module.run_rows(call, rows_at(tokens), cache))], self._num_tokens)
        self._learn(module, call, cache)
        return output

    def _learn(self, module: StateModule, call: FlatCall, cache: RowsCache) -> None:
        """Called with what the module has left in the cache."""


class StateProbe(FreshTokens):
    """Learns what modules keep, for a batch of one token, twice.

    entries: by StateModule.index, of the modules that have run.
    """

    def __init__(self) -> None:
        super().__init__(num_tokens=2)
        self.entries: dict[int, StateEntry] = {}
        self._continues_many: dict[type[nn.Module], bool] = {}

    def _learn(self, module: StateModule, call: FlatCall, cache: RowsCache) -> None:
        if module.index in self.entries:
            raise ModelLoadError(f"{module.name} runs more than once in layer {module.layer_id}")
        kept = cache.kept()
        module.places = tuple(kept)
        self.entries[module.index] = StateEntry(
            tuple(StateTensor(tuple(one.shape[1:]), one.dtype) for one in kept.values())
        )
        if module.kind not in self._continues_many:
            self._continues_many[module.kind] = continues_many(module, call)
        module.continues_many = self._continues_many[module.kind]


def continues_many(module: StateModule, probed: FlatCall) -> bool:
    """Whether several tokens on top of a state come out as they do one after the other.

    Compared with the whole sequence without a state, for noise around the first token of probed.
    Raises ModelLoadError where one after the other is wrong already.
    """
    num_tokens = _NUM_BEFORE + _NUM_AFTER
    noise = _Noise(num_tokens)
    args = tuple(noise.of(value) for value in probed.args)
    kwargs = {name: noise.of(value) for name, value in probed.kwargs.items()}
    call = FlatCall(args, kwargs, num_tokens)

    def outputs(state: State | None, *calls: torch.Tensor) -> tuple[torch.Tensor, State]:
        cache = RowsCache(module, state)
        parts = [(one[None], module.run_rows(call, rows_at(one[None]), cache)) for one in calls]
        of_tokens = _first_tensor(joined(parts, num_tokens))[0, torch.cat(calls)]
        return of_tokens, tuple(one.clone() for one in cache.kept().values())

    before, after = torch.split(torch.arange(num_tokens), [_NUM_BEFORE, _NUM_AFTER])
    want = outputs(None, torch.arange(num_tokens))[0][_NUM_BEFORE:]
    state = outputs(None, before)[1]
    # What comes out where the state is ignored: the measure of how near is near.
    without = outputs(None, after)[0]

    def is_right(got: torch.Tensor) -> bool:
        rounding = 1e-4 if got.dtype == torch.float32 else 2e-2
        allowed = 0.1 * (without - want).norm(dim=-1) + rounding * want.norm(dim=-1)
        return bool(((got - want).norm(dim=-1) <= allowed).all())

    copied = tuple(one.clone() for one in state)
    if not is_right(outputs(copied, *torch.split(after, 1))[0]):
        raise ModelLoadError(f"{module.name} does not continue from the state that it leaves")
    return is_right(outputs(state, after)[0])


class _Noise:
    """Arguments of a probe's two tokens made into those of num_tokens that differ."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._generator = torch.Generator().manual_seed(0)

    def of(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self.of(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, 2):
            return value
        tokens = value[:, :1].repeat(1, self._num_tokens, *[1] * (value.dim() - 2))
        if not tokens.is_floating_point():
            return tokens
        noise = torch.randn(tokens.shape, generator=self._generator)
        return tokens + noise.to(tokens) * tokens.float().std().to(tokens.dtype)


def _first_tensor(output: Any) -> torch.Tensor:
    while isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise ModelLoadError("a module with a state gives nothing for its tokens")
    return output
