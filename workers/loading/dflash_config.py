"""What the config.json of a DFlash checkpoint says, as z-lab publishes them.

It is Qwen3's config of the drafter's own layers, with block_size, num_target_layers and
dflash_config. Variants that compute something else are errors that name the key.
"""

from pathlib import Path
from typing import Any

from workers.errors import ModelLoadError
from workers.loading.model_folder import architecture_of, read_hf_config
from workers.models.dflash import DFlashSpec
from workers.models.llama_family import llama_family_spec

ARCHITECTURE = "DFlashDraftModel"
_SECTION = "dflash_config"
_BLOCK_SIZE, _MASK, _TAPS = "block_size", "mask_token_id", "target_layer_ids"
_NUM_TARGET_LAYERS = "num_target_layers"
_OWN_KEYS = frozenset({_BLOCK_SIZE, _MASK, _TAPS, _NUM_TARGET_LAYERS, "mask_token"})
"""Of dflash_config. mask_token: how a tokenizer writes mask_token_id."""

_OTHER_DRAFTERS = (
    *("is_causal", "causal", "use_swa", "use_sliding_window", "attention_sink_bias"),
    *("sample_from_anchor", "dspark_bonus_anchor", "shift_label", "projector_type"),
    *("markov_rank", "enable_confidence_head", "conv_kernel_size", "conv_group_size"),
    *("selector_rank", "selector_top_k", "final_logit_softcapping", "output_multiplier"),
    *("input_embedding_scale", "fc_layernorm", "target_hidden_size", "draft_vocab_size"),
)
"""Keys beside dflash_config that make a drafter another one than is served; in dflash_config every
key but its own is one. A falsy value, or a neutral one, does not."""


def read_dflash_config(folder: Path, num_target_layers: int) -> DFlashSpec:
    """Raises ModelLoadError for what is no drafter that can be served, or is of a target with
    another number of layers."""
    config: Any = read_hf_config(folder)
    if architecture_of(config) != ARCHITECTURE:
        raise ModelLoadError(
            f"{folder} is of {architecture_of(config)}; DFlash drafters are of {ARCHITECTURE}"
        )
    if config.model_type != "qwen3":
        raise ModelLoadError(
            f"{folder} has layers of {config.model_type!r}; DFlash drafters have those of 'qwen3'"
        )
    section = getattr(config, _SECTION, None) or {}
    if not isinstance(section, dict):
        raise ModelLoadError(f"{folder}: {_SECTION} is no object")
    _check_kind(folder, config, section)
    layers = llama_family_spec(config)
    stated = {key: section.get(key, getattr(config, key, None)) for key in _OWN_KEYS}
    if stated[_NUM_TARGET_LAYERS] not in (None, num_target_layers):
        raise ModelLoadError(
            f"{folder} is for a target of {stated[_NUM_TARGET_LAYERS]} layers, not of "
            f"{num_target_layers}"
        )
    return DFlashSpec(
        layers=layers,
        block_size=_integer(folder, stated, _BLOCK_SIZE, 2, config.max_position_embeddings + 1),
        mask_token_id=_integer(folder, stated, _MASK, 0, layers.vocab_size),
        tap_layers=_taps(folder, stated[_TAPS]),
    )


def _check_kind(folder: Path, config: Any, section: dict[str, Any]) -> None:
    neutral = {
        "output_multiplier": 1.0,
        "input_embedding_scale": 1.0,
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.vocab_size,
    }
    found = {key: getattr(config, key, None) for key in _OTHER_DRAFTERS}
    found |= {key: value for key, value in section.items() if key not in _OWN_KEYS}
    for key, value in found.items():
        if value and value != neutral.get(key):
            raise ModelLoadError(f"{folder}: DFlash drafters with {key}={value!r} are not served")
    others = sorted(set(config.layer_types or ()) - {"full_attention"})
    if others:
        raise ModelLoadError(f"{folder}: DFlash drafters with layers of {others} are not served")


def _integer(folder: Path, stated: dict[str, Any], key: str, least: int, bound: int) -> int:
    """In [least, bound)."""
    value = stated[key]
    if type(value) is not int or not least <= value < bound:
        raise ModelLoadError(f"{folder}: {key} is an integer in [{least}, {bound}), not {value!r}")
    return value


def _taps(folder: Path, stated: Any) -> tuple[int, ...]:
    are_layers = isinstance(stated, list) and all(type(layer) is int for layer in stated)
    if not are_layers or not stated or sorted(set(stated)) != stated:
        raise ModelLoadError(f"{folder}: {_TAPS} are ascending layers, not {stated!r}")
    return tuple(stated)
