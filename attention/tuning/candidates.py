"""Who may attend in which phase, and over which pages: the candidates of `auto-tuned`.

A candidate is a backend wherever it can do a layer, and the automatic choice in the other layers.
Data and its choice; builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from attention.backends.base import GraphAttentionBackend
from attention.capability import AttentionBackendError
from attention.config import AttentionConfig, LayerAttentionConfig
from attention.preferences import PREFERENCES, DeviceFacts
from attention.registration import BackendRegistry
from attention.registry import ATTENTION_BACKENDS, LATENT_BACKENDS
from attention.routes import AskedBackends, RouteChoice, choose_routes, needs_of_layer
from attention.selection import AttentionNeeds, select_attention_backend
from attention.timing import AttentionPhase
from attention.tuning.table import LeftOut

AUTO_TUNED = "auto-tuned"

LayerNames = tuple[str, ...]
"""A backend's name for each layer."""

_NO_FALLBACK = (
    "is made for what others cannot do rather than to be fast, and would take the time for "
    "measuring those: it attends where it is asked for by name"
)


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Candidates over one pool: by phase and by a candidate's name, in the order of preference.

    page_size, has_bounded_accounts: of that pool, as RouteChoice.
    """

    page_size: int
    has_bounded_accounts: bool
    layers: Mapping[AttentionPhase, Mapping[str, LayerNames]]
    left_out: tuple[LeftOut, ...] = ()

    def worth_measuring(self, config: AttentionConfig) -> CandidateSet:
        """Without those that a start would wait minutes for, and those that are fallbacks in all
        layers; those of a phase that has no others stay."""
        registry = ATTENTION_BACKENDS if config.latent is None else LATENT_BACKENDS

        def why_not_now(names: LayerNames) -> str:
            waits = (registry.get(name).compiles_first(config) for name in dict.fromkeys(names))
            return _not_compiled(label(names), next(filter(None, waits), ""))

        def why_not_at_all(names: LayerNames) -> str:
            is_fallback = all(registry.get(name).capability.is_fallback for name in names)
            return _NO_FALLBACK if is_fallback else ""

        return self._without(why_not_now)._without(why_not_at_all)

    def _without(self, why_not: Callable[[LayerNames], str]) -> CandidateSet:
        """Without those that why_not says something of."""
        layers, left_out = {}, list(self.left_out)
        for phase, by_name in self.layers.items():
            reasons = {one: why_not(own) for one, own in by_name.items()}
            kept = {one: own for one, own in by_name.items() if not reasons[one]}
            layers[phase] = kept or by_name
            left_out += [
                LeftOut(phase, one, reasons[one]) for one in by_name if one not in layers[phase]
            ]
        return replace(self, layers=layers, left_out=tuple(left_out))

    @property
    def names(self) -> dict[AttentionPhase, tuple[str, ...]]:
        return {phase: tuple(by_name) for phase, by_name in self.layers.items()}


@dataclass(frozen=True, slots=True)
class CandidateSearch:
    """What candidates are looked for with. graphs_decode: whether decode steps replay graphs, which
    a candidate then must allow. has_verify: whether steps verify drafts."""

    asked: AskedBackends
    device: DeviceFacts
    needs: AttentionNeeds
    layers: Sequence[LayerAttentionConfig]
    graphs_decode: bool
    has_verify: bool = False
    registry: BackendRegistry = ATTENTION_BACKENDS

    def sets(self) -> tuple[CandidateSet, ...]:
        """One over the automatic choice's pages, and one for each page size that some candidate has
        and that choice has not. Raises AttentionBackendError as choose_routes does, and where a
        phase has no candidate."""
        if self.needs.needs_deterministic:
            raise AttentionBackendError(
                f"{AUTO_TUNED} takes another kernel for another batch, so that results depend on "
                "what shares it: deterministic mode needs a backend by name"
            )
        usual = self._usual()
        found = {phase: self._of_phase(phase, usual) for phase in self._phases()}
        left_out = tuple(one for _, out in found.values() for one in out)
        layers = {phase: by_name for phase, (by_name, _) in found.items()}
        sizes = self._page_sizes(usual.page_size, layers)
        sets = [self._over(size, usual, layers, left_out) for size in sizes]
        return tuple(one for one in sets if all(one.layers.values()))

    def _usual(self) -> RouteChoice:
        """What is taken where nothing is measured."""
        asked = (self.asked.extend, self.asked.decode)
        fixed = AskedBackends(*(None if name == AUTO_TUNED else name for name in asked))
        return choose_routes(fixed, self.device, self.needs, self.layers, self.registry)

    def _phases(self) -> tuple[AttentionPhase, ...]:
        verify = (AttentionPhase.VERIFY,) if self.has_verify else ()
        return AttentionPhase.DECODE, AttentionPhase.EXTEND, *verify

    def _of_phase(
        self, phase: AttentionPhase, usual: RouteChoice
    ) -> tuple[dict[str, LayerNames], list[LeftOut]]:
        is_decode = phase is AttentionPhase.DECODE
        own = usual.routes.decode if is_decode else usual.routes.extend
        found, left_out = {label(own): own}, []
        asked = self.asked.decode if is_decode else self.asked.extend
        order = PREFERENCES[self.device.generation]
        names = order.mla if self.needs.needs_mla else order.mha
        for name in names if asked == AUTO_TUNED else ():
            try:
                by_layer = self._layers_of(name, is_decode, own)
            except AttentionBackendError as error:
                asked_for = f"attention backend {name!r} was asked for but "
                left_out.append(LeftOut(phase, name, str(error).removeprefix(asked_for)))
                continue
            obstacle = self._obstacle(by_layer, usual) or self._graph_obstacle(by_layer, own, phase)
            if obstacle:
                left_out.append(LeftOut(phase, name, obstacle))
            elif by_layer not in found.values():
                found[label(by_layer)] = by_layer
        return found, left_out

    def _layers_of(self, name: str, is_decode: bool, own: LayerNames) -> LayerNames:
        """Raises AttentionBackendError where the backend can do none of the layers."""
        wanted = [needs_of_layer(self.needs, layer) for layer in self.layers]
        if is_decode:
            wanted = [replace(needs, needs_mixed_batches=False) for needs in wanted]
        errors: dict[AttentionNeeds, AttentionBackendError | None] = {}
        for needs in wanted:
            if needs not in errors:
                errors[needs] = self._error_of(name, needs)
        refusals = [error for error in errors.values() if error is not None]
        if len(refusals) == len(errors):
            raise refusals[0]
        return tuple(
            name if errors[needs] is None else usual
            for needs, usual in zip(wanted, own, strict=True)
        )

    def _error_of(self, name: str, needs: AttentionNeeds) -> AttentionBackendError | None:
        try:
            select_attention_backend(name, self.device, needs, self.registry)
        except AttentionBackendError as error:
            return error
        return None

    def _obstacle(self, by_layer: LayerNames, usual: RouteChoice) -> str:
        """All candidates read one pool: they keep windows' tokens alike."""
        has_bounded = any(layer.sliding_window_size > 0 for layer in self.layers)
        has_bounded |= any(layer.chunk_size > 0 for layer in self.layers)
        if not (has_bounded and usual.has_bounded_accounts):
            return ""
        lacking = [
            name
            for name in dict.fromkeys(by_layer)
            if not self.registry.get(name).capability.has_bounded_accounts
        ]
        return f"{lacking[0]} keeps every token of layers with windows" if lacking else ""

    def _graph_obstacle(self, by_layer: LayerNames, own: LayerNames, phase: AttentionPhase) -> str:
        if not self.graphs_decode or phase is not AttentionPhase.DECODE:
            return ""
        if not all(map(self._is_graphable, own)):
            return ""
        lacking = [name for name in dict.fromkeys(by_layer) if not self._is_graphable(name)]
        return f"{lacking[0]} cannot be captured in CUDA graphs" if lacking else ""

    def _is_graphable(self, name: str) -> bool:
        registry = LATENT_BACKENDS if self.needs.needs_mla else self.registry
        return issubclass(registry.get(name), GraphAttentionBackend)

    def _page_sizes(
        self, usual: int, layers: Mapping[AttentionPhase, Mapping[str, LayerNames]]
    ) -> tuple[int, ...]:
        sizes = {usual: None}
        for by_name in layers.values():
            for names in by_name.values():
                if not any(self._works_with(names, size) for size in sizes):
                    sizes[self.registry.get(names[0]).capability.default_page_size] = None
        return tuple(sizes)

    def _works_with(self, names: LayerNames, page_size: int) -> bool:
        capabilities = (self.registry.get(name).capability for name in dict.fromkeys(names))
        return all(page_size in capability.page_sizes for capability in capabilities)

    def _over(
        self,
        page_size: int,
        usual: RouteChoice,
        layers: Mapping[AttentionPhase, Mapping[str, LayerNames]],
        left_out: tuple[LeftOut, ...],
    ) -> CandidateSet:
        fitting = {
            phase: {
                name: names for name, names in by_name.items() if self._works_with(names, page_size)
            }
            for phase, by_name in layers.items()
        }
        others = tuple(
            LeftOut(phase, name, f"does not work with pages of {page_size} tokens")
            for phase, by_name in layers.items()
            for name in by_name.keys() - fitting[phase].keys()
        )
        return CandidateSet(page_size, usual.has_bounded_accounts, fitting, (*left_out, *others))


def _not_compiled(name: str, waits: str) -> str:
    if not waits:
        return ""
    return (
        f"takes minutes to build on this machine ({waits}): one start with "
        f"attention_backend={name} does that"
    )


def label(by_layer: LayerNames) -> str:
    """A candidate's name: its backends', each once."""
    return "+".join(dict.fromkeys(by_layer))


def is_tuned(asked: AskedBackends) -> bool:
    return AUTO_TUNED in (asked.extend, asked.decode)
