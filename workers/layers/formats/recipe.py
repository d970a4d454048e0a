"""Which module of a model is stored in which format. Knows no checkpoint's way of saying so."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workers.layers.formats.format import WeightFormat
from workers.layers.formats.plain import PLAIN

# What precedes a causal model's module names in checkpoints of models around one.
_WRAPPERS = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("", "language_model."),
)


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Modules whose whole name one of the patterns matches are of format."""

    patterns: tuple[re.Pattern[str], ...]
    format: WeightFormat

    def matches(self, module: str) -> bool:
        return any(pattern.fullmatch(module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """name: as its maker calls it ("compressed-tensors"). rules: the first that matches counts; a
    module without one is unquantised."""

    name: str
    rules: tuple[FormatRule, ...]

    def format_of(self, module: str) -> WeightFormat:
        """Of a linear module, by the name a causal model has for it."""
        names = _names_of(module)
        for rule in self.rules:
            if any(rule.matches(name) for name in names):
                return rule.format
        return PLAIN

    @property
    def titles(self) -> tuple[str, ...]:
        """Formats that modules may have, for people."""
        quantised = [rule.format for rule in self.rules if rule.format != PLAIN]
        return tuple(dict.fromkeys(one.title for one in quantised))


EVERY_MODULE = re.compile(".*")


def _names_of(module: str) -> Sequence[str]:
    """Under which a recipe may speak of it."""
    wrapped = [
        wrapper + module.removeprefix(plain)
        for plain, wrapper in _WRAPPERS
        if module.startswith(plain)
    ]
    return [module, *wrapped]
