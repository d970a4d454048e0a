"""Other values that a model's config states and transformers takes as they are, looked at before
anything is computed of them."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from workers.errors import ModelLoadError

_ROPE_NUMBERS = ("rope_theta", "factor")


def check_values(path: Path, config: PreTrainedConfig) -> None:
    """config: as transformers has read it from path.

    Raises ModelLoadError for architectures that are no list of names, and for a base or a factor of
    rotary positions that is no number above zero.
    """
    named: Any = config.architectures
    are_names = isinstance(named, list) and all(isinstance(name, str) for name in named)
    if named is not None and not are_names:
        raise ModelLoadError(f"{path}: architectures are a list of names, not {named!r}")
    for parameters in _ropes(vars(config).get("rope_parameters")):
        for key in _ROPE_NUMBERS:
            value = parameters.get(key)
            if value is not None and not _is_above_zero(value):
                raise ModelLoadError(f"{path}: {key} is a number above 0, not {value!r}")


def _ropes(stated: Any) -> Iterator[Mapping[str, Any]]:
    """The one of all layers, or those of their kinds."""
    if isinstance(stated, Mapping):
        yield stated
        yield from (kind for kind in stated.values() if isinstance(kind, Mapping))


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
