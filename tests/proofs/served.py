"""Which cells of the table of models a test proves: what its marker says, of which models.

`@serves(ModelFeature.GRAPHS)` names features, and architectures or kinds of models by their names
in workers.models.features. Without these, they are the architectures of the tiny models
(tests/fakes/tiny_models.py) that the test's parameters name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.tiny_models import THROUGH_TRANSFORMERS, TINY_MODELS, architecture_of
from tests.proofs.cells import MODELS_MARKER, Cell
from workers.models.features import FLAT, TEXT_OF, ModelFeature


def serves(*subjects_and_features: str | ModelFeature) -> pytest.MarkDecorator:
    """Features that the test proves, and of which subjects, where its parameters do not show it."""
    features = [what for what in subjects_and_features if isinstance(what, ModelFeature)]
    subjects = [what for what in subjects_and_features if isinstance(what, str)]
    mark: pytest.MarkDecorator = getattr(pytest.mark, MODELS_MARKER)
    return mark(subjects=subjects, whats=[feature.value for feature in features])


def served_cells_of(item: pytest.Item) -> frozenset[Cell]:
    """Empty for a test without the marker. ValueError where nobody says which model it is."""
    cells: set[Cell] = set()
    for mark in item.iter_markers(MODELS_MARKER):
        subjects = set(mark.kwargs["subjects"]) or set(_named(item))
        if not subjects:
            raise ValueError(f"{item.nodeid} serves no model that is known by its parameters")
        cells |= {Cell(subject, what) for subject in subjects for what in mark.kwargs["whats"]}
    return frozenset(cells)


def _named(item: pytest.Item) -> Iterator[str]:
    callspec = getattr(item, "callspec", None)
    for value in () if callspec is None else callspec.params.values():
        for name in value if isinstance(value, tuple) else (value,):
            if not isinstance(name, str):
                continue
            if name in TINY_MODELS:
                architecture = architecture_of(name)
                yield TEXT_OF.get(architecture, architecture)
            elif name in THROUGH_TRANSFORMERS:
                yield FLAT.subject
