"""Which class of transformers runs a config, and which cannot be served. Builds no model."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from workers.errors import ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_layer_types import PLAIN_LAYER_TYPES

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# "hybrid": a layer that attends and keeps a state.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
# Of a model for images and text, the text is served.
_MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the config. Raises ModelLoadError if RadixAttention cannot serve it.

    Refused: encoder-decoders, layers that attend by an index, models outside the attention
    interface, and heads other than language models.
    """
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{config.model_type} is an encoder-decoder, not a causal model")
    model_class = _mapped_class(config)
    name = model_class.__name__
    _check_layers(name, text_config_of(config))
    # Classes that keep states do not say whether they do; it shows when they run.
    if not model_class._supports_attention_backend and not may_keep_states(config, model_class):
        raise ModelLoadError(f"{name} does not go through transformers' attention interface")
    return model_class


def part_for_class(config: PreTrainedConfig, model_class: Any) -> PreTrainedConfig:
    """The config that the class is built from: some wrappers name the class of their text alone."""
    text_config: PreTrainedConfig = text_config_of(config)
    return text_config if type(text_config) is model_class.config_class else config


def _mapped_class(config: PreTrainedConfig) -> Any:
    """The one that config.architectures names, of those that generate text from this config."""
    classes: list[Any] = [mapping[type(config)] for mapping in _MAPPINGS if type(config) in mapping]
    if not classes:
        raise ModelLoadError(f"transformers has no causal language model for {config.model_type!r}")
    if any(isinstance(model_class, tuple) for model_class in classes):
        raise ModelLoadError(f"transformers has more than one class for {config.model_type!r}")
    for model_class in classes:
        if model_class.__name__ in (config.architectures or [model_class.__name__]):
            return model_class
    names = " or ".join(model_class.__name__ for model_class in classes)
    raise ModelLoadError(f"{config.architectures} is not {names}, a causal language model")


def may_keep_states(config: PreTrainedConfig, model_class: Any) -> bool:
    """Whether layers may keep a convolution or recurrent state: by the kinds of layers that the
    config names, or where it names none, by the class. Which ones do, shows when they run."""
    kinds = set(getattr(text_config_of(config), "layer_types", None) or ())
    return bool(kinds & _STATE_LAYER_TYPES if kinds else model_class._is_stateful)


def _check_layers(name: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    odd = kinds - _SERVED_LAYER_TYPES - _STATE_LAYER_TYPES - PLAIN_LAYER_TYPES
    if odd:
        raise ModelLoadError(f"{name} has unsupported layers: {', '.join(sorted(odd))}")
