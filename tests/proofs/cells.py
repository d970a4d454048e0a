"""Which cells of the matrix a test proves: what its marker says and what its parameters show.

`@proves("fa3", Feature.GRAPHS)` names backends and features. Backends that a marker does not name
are those among the test's parameters; steps, layers, kinds of visibility and page sizes among the
parameters are proved as what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from attention import LayerAttentionConfig
from attention.backends.base import AttentionBackend
from attention.features import Feature
from tests.unit.attention.cases import RowSpec
from tests.unit.attention.visibility_cases import KINDS

MARKER = "proves"
MODELS_MARKER = "serves"
"""Of tests/proofs/served.py."""
PAGE_SIZE = "page size"
MAX_DRAFTS = 16
_VISIBILITIES = {
    KINDS["tree"]: Feature.TREE,
    KINDS["items"]: Feature.ITEMS,
    KINDS["everything"]: Feature.EVERYTHING,
}
_CAUSAL_STEPS = {
    feature.value for feature in (Feature.EXTEND, Feature.MIXED, Feature.VERIFY, Feature.DECODE)
}


class Cell(NamedTuple):
    """what: a Feature's name, or as "page size 16". Of the table of models: backend is a model's
    architecture or kind, what a ModelFeature's name."""

    backend: str
    what: str


def proves(*backends_and_features: str, page_size: int | None = None) -> pytest.MarkDecorator:
    """Names of backends, and what the parameters do not show."""
    features = tuple(what for what in backends_and_features if isinstance(what, Feature))
    backends = tuple(what for what in backends_and_features if not isinstance(what, Feature))
    pages = () if page_size is None else (_page_size(page_size),)
    mark: pytest.MarkDecorator = getattr(pytest.mark, MARKER)
    return mark(backends=backends, whats=(*(feature.value for feature in features), *pages))


def cells_of(item: pytest.Item) -> frozenset[Cell]:
    """Empty for a test without the marker. ValueError where nobody says which backend it is."""
    marks = list(item.iter_markers(MARKER))
    if not marks:
        return frozenset()
    callspec = getattr(item, "callspec", None)
    parameters = {} if callspec is None else callspec.params
    backends = {name for mark in marks for name in mark.kwargs["backends"]}
    backends |= {
        value.capability.name
        for value in parameters.values()
        if isinstance(value, type) and issubclass(value, AttentionBackend)
    }
    if not backends:
        raise ValueError(f"{item.nodeid} proves cells of no backend")
    said = {what for mark in marks for what in mark.kwargs["whats"]}
    shown = {what for name, value in parameters.items() for what in _shown(name, value)}
    seen = {_VISIBILITIES[value].value for value in parameters.values() if _is_make(value)}
    shown = shown - _CAUSAL_STEPS | seen if seen else shown
    if not said & {Feature.MLA.value, Feature.CROSS.value}:
        said.add(Feature.HEADS.value)
    return frozenset(Cell(backend, what) for backend in backends for what in said | shown)


def _shown(name: str, value: object) -> Iterator[str]:
    """By a parameter of a test."""
    if name == "page_size" and isinstance(value, int):
        yield _page_size(value)
    elif isinstance(value, LayerAttentionConfig):
        yield from _of_layer(value)
    elif isinstance(value, tuple) and value and all(isinstance(row, RowSpec) for row in value):
        yield from _of_rows(value)


def _page_size(page_size: int) -> str:
    return f"{PAGE_SIZE} {page_size}"


def _is_make(value: object) -> bool:
    return callable(value) and value in _VISIBILITIES


def _of_layer(layer: LayerAttentionConfig) -> Iterator[str]:
    if layer.sliding_window_size > 0:
        yield Feature.WINDOW.value
    if layer.chunk_size > 0:
        yield Feature.CHUNKS.value
    if layer.logit_cap > 0.0:
        yield Feature.CAP.value
    if layer.has_sinks:
        yield Feature.SINKS.value


def _of_rows(rows: tuple[RowSpec, ...]) -> Iterator[str]:
    """Of a step of these rows that is seen causally."""
    longest = max(row.num_new for row in rows)
    if longest <= 1:
        yield Feature.DECODE.value
        return
    yield Feature.EXTEND.value
    if any(row.num_new == 1 for row in rows):
        yield Feature.MIXED.value
    if any(row.prefix_len and 1 < row.num_new <= MAX_DRAFTS for row in rows):
        yield Feature.VERIFY.value
