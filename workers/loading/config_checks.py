"""What a model's config states, looked at before anything is built or computed of it: sizes that no
model has, and values that transformers takes as they are."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from workers.errors import ModelLoadError

_NUM_LAYERS = "num_hidden_layers"
_Q_HEADS, _KV_HEADS, _HEAD_DIM = "num_attention_heads", "num_key_value_heads", "head_dim"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", _NUM_LAYERS),
    *(_Q_HEADS, _KV_HEADS, _HEAD_DIM),
)
_MOST = 2**31 - 1
"""Far beyond any model; what torch says of larger ones names no key."""
_MOST_LAYERS = 10_000
"""Each is built before its weights are asked for."""
_ROPE_NUMBERS = ("rope_theta", "factor")


def check_config(path: Path, config: PreTrainedConfig) -> None:
    """config: of a model or of its text, as transformers has read it from path.

    Raises ModelLoadError for a size below one or beyond any model's, for heads of queries that do
    not share those of keys and values, for architectures that are no list of names, and for a base
    or a factor of rotary positions or a norm's epsilon that is no number of its kind. What a family
    does not state, or states for each layer, is not looked at.
    """
    _check_values(path, config)
    _check_sizes(path, config)


def why_unreadable(path: Path, error: Exception) -> str:
    """One line, of what transformers raised when it read path: with the key that it stumbled on, as
    far as that shows."""
    stated = _json_object(path)
    reason = "" if stated is None else _odd_key(stated)
    return f"{path} cannot be used: {reason or ' '.join(str(error).split())}"


def _json_object(path: Path) -> Mapping[str, Any] | None:
    """None for a file that is none."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return stated if isinstance(stated, dict) else None


def _odd_key(stated: Mapping[str, Any]) -> str:
    """The first that explains why a config cannot be read, or ""."""
    model_type = stated.get("model_type")
    if not isinstance(model_type, str):
        return f"model_type is a name, not {model_type!r}"
    if model_type not in CONFIG_MAPPING:
        return f"model_type {model_type!r} is not known to transformers {transformers.__version__}"
    parts = (stated, stated.get("text_config"))
    return next((odd for one in parts if isinstance(one, dict) and (odd := _odd_part(one))), "")


def _odd_part(stated: Mapping[str, Any]) -> str:
    recipe = stated.get("quantization_config")
    if recipe is not None and not isinstance(recipe, dict):
        return f"quantization_config is a JSON object, not {recipe!r}"
    sizes = {name: stated.get(name) for name in _SIZES}
    small = (f"{name}={size}" for name, size in sizes.items() if type(size) is int and size < 1)
    return next((f"{size} is less than 1" for size in small), "")


def _check_sizes(path: Path, config: PreTrainedConfig) -> None:
    sizes = {name: size for name in _SIZES if type(size := _stated(config, name)) is int}
    if _stated(config, "qk_nope_head_dim") is not None:
        # Of models that keep latents nobody reads it, and some say 0.
        sizes.pop(_HEAD_DIM, None)
    for name, size in sizes.items():
        if size < 1:
            raise ModelLoadError(f"{path}: {name}={size} is less than 1")
        most = _MOST_LAYERS if name == _NUM_LAYERS else _MOST
        if size > most:
            raise ModelLoadError(f"{path}: {name}={size} is more than {most}")
    if {_Q_HEADS, _KV_HEADS} <= sizes.keys() and sizes[_Q_HEADS] % sizes[_KV_HEADS]:
        raise ModelLoadError(
            f"{path}: {_Q_HEADS}={sizes[_Q_HEADS]} is no multiple of {_KV_HEADS}={sizes[_KV_HEADS]}"
        )


def _check_values(path: Path, config: PreTrainedConfig) -> None:
    named: Any = config.architectures
    are_names = isinstance(named, list) and all(isinstance(name, str) for name in named)
    if named is not None and not are_names:
        raise ModelLoadError(f"{path}: architectures are a list of names, not {named!r}")
    for parameters in _ropes(vars(config).get("rope_parameters")):
        for key in _ROPE_NUMBERS:
            value = parameters.get(key)
            if value is not None and not _is_above_zero(value):
                raise ModelLoadError(f"{path}: {key} is a number above 0, not {value!r}")
    eps: Any = vars(config).get("rms_norm_eps")
    if eps is not None and not (type(eps) in (int, float) and 0 <= eps < math.inf):
        raise ModelLoadError(f"{path}: rms_norm_eps is a number from 0 on, not {eps!r}")


def _stated(config: PreTrainedConfig, name: str) -> Any:
    """Under the family's own name for it. Not asked for as an attribute: that is an error where
    layers have values of their own."""
    return vars(config).get(config.attribute_map.get(name, name))


def _ropes(stated: Any) -> Iterator[Mapping[str, Any]]:
    """The one of all layers, or those of their kinds."""
    if isinstance(stated, Mapping):
        yield stated
        yield from (kind for kind in stated.values() if isinstance(kind, Mapping))


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
