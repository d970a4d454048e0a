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
from attention.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class AskedBackends:
    """Names that an operator gave. None: the first that works is taken."""

    extend: str | None = None
    decode: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionRoutes:
    """A backend's name for each layer. extend: in steps in which some row has several new tokens,
    rows that decode beside it included. decode: in steps of one new token a row. trees: in steps
    whose new tokens are trees of drafts, where others than extend's attend in these."""

    extend: tuple[str, ...]
    decode: tuple[str, ...]
    trees: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, those of decode steps first."""
        return _each_once((*self.decode, *self.extend, *self.trees))

    def name_in(self, mode: ForwardMode) -> str:
        """Of the backends of such a step, as text."""
        return "+".join(_each_once(self.decode if mode.is_decode else self.extend))

    def __str__(self) -> str:
        extend, decode = self.name_in(ForwardMode.EXTEND), self.name_in(ForwardMode.DECODE)
        if self.trees:
            trees = "+".join(_each_once(self.trees))
            return f"{extend} (prefill), {decode} (decode), {trees} (draft trees)"
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

    Steps with trees go to a backend of their own where that of prompts has no masks for them.

    Raises AttentionBackendError when a backend that was asked for cannot work for one of them, when
    none can, or when the chosen ones have no page size in common.
    """
    chosen: dict[tuple[str | None, AttentionNeeds], BackendChoice] = {}

    def choose(name: str | None, wanted: AttentionNeeds) -> str:
        if (name, wanted) not in chosen:
            chosen[name, wanted] = select_attention_backend(name, device, wanted, registry)
        return chosen[name, wanted].name

    plain = replace(needs, visibilities=needs.visibilities - {VisibilityKind.TREE})
    of_layers = [needs_of_layer(plain, layer) for layer in layers]
    decode = tuple(
        choose(asked.decode, replace(wanted, needs_mixed_batches=False)) for wanted in of_layers
    )
    extend = tuple(choose(asked.extend, wanted) for wanted in of_layers)
    trees = extend
    if VisibilityKind.TREE in needs.visibilities:
        trees = tuple(
            name if _has_trees(name, registry) else choose(None, needs_of_layer(needs, layer))
            for name, layer in zip(extend, layers, strict=True)
        )
    routes = AttentionRoutes(extend, decode, () if trees == extend else trees)
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


def _has_trees(name: str, registry: BackendRegistry) -> bool:
    return VisibilityKind.TREE in registry.get(name).capability.visibilities


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
