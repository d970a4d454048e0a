"""What a model of transformers calls the cache that it takes."""

from collections.abc import Callable
from inspect import signature
from typing import Any

# "cache" since transformers 5.24, which has no other; before, "cache_params" where a layer keeps
# states and no keys.
_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(forward: Callable[..., Any]) -> str | None:
    """The parameter of a forward that takes the cache; None if it takes none."""
    parameters = signature(forward).parameters
    return next((name for name in _NAMES if name in parameters), None)
