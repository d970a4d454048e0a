"""Whether a class of transformers can run as a flat batch, as far as that shows without weights.

The class is built on the meta device, where nothing has a value, and run for two tokens. What
depends on values, as whether a model counts its positions, shows when its weights are there.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from workers.errors import ConfigError, ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_attention import (
    ATTENTION_NAME,
    AttentionProbe,
    register_attention_interface,
)
from workers.models.transformers_body import FlatBody
from workers.models.transformers_class import missing_packages_named, part_for_class
from workers.models.transformers_layer_types import check_layers, check_windows
from workers.models.transformers_model import with_attention
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_state_probe import FreshTokens

# What code that misses something raises. Others may come of the meta device.
_MISSING = (AttributeError, TypeError)
_OF_META = (RuntimeError, ValueError, LookupError, NameError, AssertionError)


def row_by_row_refusal(obstacle: str) -> ConfigError:
    """obstacle: why a model cannot be a flat batch."""
    return ConfigError(f"{obstacle}; row by row it runs on CPU only so far; set device='cpu'")


def own_attention_obstacle(parts: BodyAndHead) -> str:
    """Of a class that picks attention from a table of its own."""
    return f"{type(parts.head).__name__} has no place for another attention than its own"


def flat_obstacle(config: PreTrainedConfig, model_class: Any) -> str:
    """Why the class cannot be a flat batch; "" where it may. model_class: keeps no states.

    Raises ModelLoadError when it needs a package that is missing.
    """
    register_attention_interface()
    config = copy.deepcopy(part_for_class(config, model_class))
    with torch.device("meta"), missing_packages_named(model_class):
        model = with_attention(
            config,
            lambda attention: model_class._from_config(config, attn_implementation=attention),
        ).eval()
        try:
            return _obstacle_of(BodyAndHead.of(model))
        except ModelLoadError as error:
            return str(error)


def _obstacle_of(parts: BodyAndHead) -> str:
    """Raises ModelLoadError for some of what stands in the way."""
    config = text_config_of(parts.head.config)
    if config._attn_implementation != ATTENTION_NAME:
        return own_attention_obstacle(parts)
    probe = _MetaProbe()
    try:
        _run_two_tokens(parts, config, probe)
    except _MISSING as error:
        return f"{type(parts.head).__name__} cannot run as a flat decoder: {error}"
    except _OF_META:
        return ""
    check_layers(config, probe.calls, set())
    check_windows(config, probe.calls)
    return ""


@torch.inference_mode()
def _run_two_tokens(parts: BodyAndHead, config: Any, probe: AttentionProbe) -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    flat = FlatBody(parts.body, config, keeps_states=False)
    flat.run(tokens, torch.zeros_like(tokens), probe, FreshTokens(2))


class _MetaProbe(AttentionProbe):
    """Of tokens without values, of which no two differ."""

    def _check_tokens(self, name: str, *brought: torch.Tensor) -> None:
        """They cannot be compared."""
