"""Rotary frequencies that transformers picks by the longest text of a call."""

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.errors import ConfigError, ModelLoadError


def fix_rope(body: nn.Module, config: Any, max_context_len: int) -> None:
    """Make rotary frequencies independent of what else is in the batch.

    transformers picks them by the highest position of the whole call. longrope: the set that
    max_context_len calls for serves every position. dynamic: refused beyond the range in which it
    is the identity. config: of the text.
    """
    for module in body.modules():
        rope_type = getattr(module, "rope_type", "default")
        if isinstance(rope_type, dict):
            if {"dynamic", "longrope"} & set(rope_type.values()):
                raise ModelLoadError(f"{type(module).__name__} mixes rope types {rope_type}")
        elif rope_type == "dynamic" and max_context_len > config.max_position_embeddings:
            raise ConfigError(
                f"dynamic rope beyond {config.max_position_embeddings} tokens is not supported "
                f"here; lower max_context_len={max_context_len}"
            )
        elif rope_type == "longrope":
            original = config.rope_parameters["original_max_position_embeddings"]
            if max_context_len > original:
                inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=original + 1)
                module.get_buffer("inv_freq").copy_(inv_freq)
        if rope_type in ("dynamic", "longrope"):
            # From here on no pass looks at its positions.
            setattr(module, "rope_type", "default")  # noqa: B010 - a module's attributes are modules
