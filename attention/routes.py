"""Which backend attends: by phase of the step and by layer. Data and its choice, no backend.

A model whose layers are alike and whose phases take one backend has one route. Prefill steps and
decode steps may take different backends over one pool, and so may layers that ask for different
things: windows, chunks, caps, sinks, an encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attention.capability import AttentionBackendError
from attention.config import LayerAttentionConfig
from attention.forward_batch import ForwardMode
from attention.preferences import DeviceFacts
from attention.registration import BackendRegistry
from attention.registry import ATTENTION_BACKENDS
from attention.selection import AttentionNeeds, BackendChoice, select_attention_backend


@dataclass(frozen=True, slots=True)
class AskedBackends:
    """Names that an operator gave. None: the first that works is taken."""

    extend: str | None = None
    decode: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionRoutes:
    """A backend's name for each layer. extend: in steps in which some row has several new tokens,
    rows that decode beside it included. decode: in steps of one new token a row."""

    extend: tuple[str, ...]
    decode: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, those of decode steps first."""
        return _each_once((*self.decode, *self.extend))

    def name_in(self, mode: ForwardMode) -> str:
        """Of the backends of such a step, as text."""
        return "+".join(_each_once(self.decode if mode.is_decode else self.extend))

    def __str__(self) -> str:
        extend, decode = self.name_in(ForwardMode.EXTEND), self.name_in(ForwardMode.DECODE)
        return decode if extend == decode else f"{extend} (prefill), {decode} (decode)"


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """page_size: tokens a page of the pool that all of them read. has_bounded_accounts: whether all
    of them have, as BackendCapability."""

    routes: AttentionRoutes
    page_size: int
    has_bounded_accounts: bool


def choose_routes(
    asked: AskedBackends,
    device: DeviceFacts,
    needs: AttentionNeeds,
    layers: Sequence[LayerAttentionConfig],
    registry: BackendRegistry = ATTENTION_BACKENDS,
) -> RouteChoice:
    """Choose for each phase and each kind of layers. needs: what all layers have in common.

    Raises AttentionBackendError when a backend that was asked for cannot work for one of them, when
    none can, or when the chosen ones have no page size in common.
    """
    chosen: dict[tuple[str | None, AttentionNeeds], BackendChoice] = {}

    def choose(name: str | None, wanted: AttentionNeeds) -> str:
        if (name, wanted) not in chosen:
            chosen[name, wanted] = select_attention_backend(name, device, wanted, registry)
        return chosen[name, wanted].name

    of_layers = [needs_of_layer(needs, layer) for layer in layers]
    decode = tuple(
        choose(asked.decode, replace(wanted, needs_mixed_batches=False)) for wanted in of_layers
    )
    routes = AttentionRoutes(tuple(choose(asked.extend, wanted) for wanted in of_layers), decode)
    return RouteChoice(
        routes,
        _common_page_size(chosen.values(), needs.page_size, registry),
        all(choice.has_bounded_accounts for choice in chosen.values()),
    )


def needs_of_layer(needs: AttentionNeeds, layer: LayerAttentionConfig) -> AttentionNeeds:
    """With what the layer asks for beside what all have in common."""
    return replace(
        needs,
        needs_sliding_window=layer.sliding_window_size > 0,
        needs_logit_cap=layer.logit_cap > 0.0,
        needs_sinks=layer.has_sinks,
        needs_chunked_attention=layer.chunk_size > 0,
        chunk_size=max(layer.chunk_size, 0),
        needs_cross_attention=layer.max_encoder_tokens > 0,
    )


def _common_page_size(
    choices: Iterable[BackendChoice], asked: int | None, registry: BackendRegistry
) -> int:
    """The first backend's own best that all of them work with."""
    if asked is not None:
        return asked
    by_name = {choice.name: choice.page_size for choice in choices}
    capabilities = [registry.get(name).capability for name in by_name]
    for page_size in by_name.values():
        if all(page_size in capability.page_sizes for capability in capabilities):
            return page_size
    defaults = ", ".join(f"{name}: {page_size}" for name, page_size in by_name.items())
    raise AttentionBackendError(
        f"attention backends of one pool need a page size that all work with ({defaults}); ask for "
        "a page_size, or for other backends"
    )


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
