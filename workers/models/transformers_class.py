"""Which class of transformers runs a config, and which cannot be served. Builds no model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from workers.errors import ConfigError, ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_cache_name import cache_name
from workers.models.transformers_layer_types import PLAIN_LAYER_TYPES

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Layers that attend to tokens that an indexer scores highest (DeepSeek-V3.2), as releases of
# transformers name them.
_INDEXED_LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}
# "hybrid": a layer that attends and keeps a state.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
# Of a model for images and text, the text is served.
_MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the config. Raises ModelLoadError if RadixAttention cannot serve it.

    Refused: encoder-decoders, layers of unknown kinds, heads other than language models, and what
    has neither a place for another attention nor a cache. How others attend, shows when they run.
    """
    if is_encoder_decoder(config):
        raise ModelLoadError(f"{config.model_type} is an encoder-decoder, not a causal model")
    model_class = _mapped_class(config)
    name = model_class.__name__
    _check_layers(name, text_config_of(config))
    # Classes that keep states do not say whether they do; it shows when they run.
    attends = model_class._supports_attention_backend or may_keep_states(config, model_class)
    if not attends and cache_name(model_class.forward) is None:
        raise ModelLoadError(
            f"{name} does not go through transformers' attention interface and takes no cache"
        )
    return model_class


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Whether its class has an encoder: architectures may name that of the decoder alone."""
    return bool(config.is_encoder_decoder) and _named_causal_class(config) is None


def part_for_class(config: PreTrainedConfig, model_class: Any) -> PreTrainedConfig:
    """The config that the class is built from: some wrappers name the class of their text alone."""
    text_config: PreTrainedConfig = text_config_of(config)
    return text_config if type(text_config) is model_class.config_class else config


def _mapped_class(config: PreTrainedConfig) -> Any:
    """The one that config.architectures names, of those that generate text from this config."""
    named = _named_causal_class(config)
    if named is not None:
        return named
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


def _named_causal_class(config: PreTrainedConfig) -> Any:
    """The causal class that config.architectures names, if that one is built from this very config:
    a part of an encoder-decoder, or of a wrapper whose type alone is mapped. None otherwise."""
    for name in config.architectures or []:
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            model_class = getattr(transformers, name)
            if model_class.config_class is type(config):
                return model_class
    return None


def may_keep_states(config: PreTrainedConfig, model_class: Any) -> bool:
    """Whether layers may keep a convolution or recurrent state: by the kinds of layers that the
    config names, or where it names none, by the class. Which ones do, shows when they run."""
    kinds = set(getattr(text_config_of(config), "layer_types", None) or ())
    return bool(kinds & _STATE_LAYER_TYPES if kinds else model_class._is_stateful)


def _check_layers(name: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    odd = kinds - _SERVED_LAYER_TYPES - _STATE_LAYER_TYPES - PLAIN_LAYER_TYPES
    if not kinds & _STATE_LAYER_TYPES:
        odd -= _INDEXED_LAYER_TYPES
    if odd:
        raise ModelLoadError(f"{name} has unsupported layers: {', '.join(sorted(odd))}")


@contextmanager
def obstacles_named(model_class: Any) -> Iterator[None]:
    """What keeps transformers from building a model becomes a ModelLoadError: a package that it
    misses, of images mostly, or a config that its own classes do not take."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{model_class.__name__} cannot be built here: {reason}") from error
