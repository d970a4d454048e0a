"""Sizes that a model's config states, looked at before anything is built of them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from workers.errors import ModelLoadError

_Q_HEADS, _KV_HEADS, _HEAD_DIM = "num_attention_heads", "num_key_value_heads", "head_dim"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *(_Q_HEADS, _KV_HEADS, _HEAD_DIM),
)
_MOST = 2**31 - 1
"""Far beyond any model; what torch says of larger ones names no key."""


def check_sizes(path: Path, config: PreTrainedConfig) -> None:
    """config: of a language model, as transformers has read it from path.

    Raises ModelLoadError for a size below one or beyond 2^31 - 1, and for heads of queries that do
    not share those of keys and values. What a family does not state, or states for each layer, is
    not looked at.
    """
    sizes = {name: size for name in _SIZES if type(size := _stated(config, name)) is int}
    if _stated(config, "qk_nope_head_dim") is not None:
        # Of models that keep latents nobody reads it, and some say 0.
        sizes.pop(_HEAD_DIM, None)
    for name, size in sizes.items():
        if size < 1:
            raise ModelLoadError(f"{path}: {name}={size} is less than 1")
        if size > _MOST:
            raise ModelLoadError(f"{path}: {name}={size} is more than {_MOST}")
    if {_Q_HEADS, _KV_HEADS} <= sizes.keys() and sizes[_Q_HEADS] % sizes[_KV_HEADS]:
        raise ModelLoadError(
            f"{path}: {_Q_HEADS}={sizes[_Q_HEADS]} is no multiple of {_KV_HEADS}={sizes[_KV_HEADS]}"
        )


def _stated(config: PreTrainedConfig, name: str) -> Any:
    """Under the family's own name for it. Not asked for as an attribute: that is an error where
    layers have values of their own."""
    return vars(config).get(config.attribute_map.get(name, name))
