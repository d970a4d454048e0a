"""What tells Gemma 2 and Gemma 3 apart, read from their Hugging Face configs.

One function a model_type, each returns the same frozen spec; the model itself never asks which
member it is. Of a model for images and text it is the text part's. Knows no tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attention import LayerAttentionConfig
from workers.errors import ModelLoadError
from workers.layers.rope_frequencies import RopeSpec
from workers.models.llama_family import rope_spec_of

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_WITH_IMAGES = "gemma3"
_IMAGE_PARTS = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True, slots=True)
class GemmaSpec:
    """A decoder with a norm before and after each block, rotary positions and a GEGLU block.

    scaling: factor of the scores. layer_types: by which ropes are chosen. ropes: by layer type.
    logit_cap: of the head's logits, None for none. unread_prefixes: of names in the checkpoint that
    take no part in text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    scaling: float
    has_qk_norm: bool
    has_tied_embeddings: bool
    layers: tuple[LayerAttentionConfig, ...]
    layer_types: tuple[str, ...]
    ropes: Mapping[str, RopeSpec]
    logit_cap: float | None
    unread_prefixes: tuple[str, ...]

    @property
    def has_qkv_bias(self) -> bool:
        return False

    @property
    def has_o_bias(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a model_type adds to the fields both share."""

    has_qk_norm: bool
    attention_cap: float
    ropes: Mapping[str, RopeSpec]


def _gemma2(config: Any) -> _Traits:
    rope = rope_spec_of(config.rope_parameters, config.max_position_embeddings, config.head_dim)
    return _Traits(
        has_qk_norm=False,
        attention_cap=config.attn_logit_softcapping or 0.0,
        ropes=dict.fromkeys(config.layer_types, rope),
    )


def _gemma3(config: Any) -> _Traits:
    if config.attn_logit_softcapping is not None:
        raise ModelLoadError("Gemma 3 caps no scores, attn_logit_softcapping is set")
    return _Traits(
        has_qk_norm=True,
        attention_cap=0.0,
        ropes={
            kind: rope_spec_of(
                config.rope_parameters[kind], config.max_position_embeddings, config.head_dim
            )
            for kind in config.layer_types
        },
    )


_TRAITS: dict[str, Callable[[Any], _Traits]] = {"gemma2": _gemma2, "gemma3_text": _gemma3}


def gemma_obstacle(config: Any) -> str | None:
    """Why the native family cannot run a config that names one of its architectures."""
    try:
        gemma_spec(config)
    except ModelLoadError as error:
        return str(error)
    return None


def gemma_spec(config: Any) -> GemmaSpec:
    """The spec of a transformers config of a member. Raises ModelLoadError if it has oddities."""
    is_wrapper = config.model_type == _WITH_IMAGES
    text = config.get_text_config() if is_wrapper else config
    if text.model_type not in _TRAITS:
        raise ModelLoadError(f"model_type {config.model_type!r} is not of the Gemma family")
    _check(text)
    traits = _TRAITS[text.model_type](text)
    if any(rope.rotary_dim != text.head_dim for rope in traits.ropes.values()):
        raise ModelLoadError("the native Gemma family rotates whole heads")
    return GemmaSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_q_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rms_norm_eps=text.rms_norm_eps,
        scaling=float(text.query_pre_attn_scalar**-0.5),
        has_qk_norm=traits.has_qk_norm,
        has_tied_embeddings=config.tie_word_embeddings,
        layers=_layers(text, traits.attention_cap),
        layer_types=tuple(text.layer_types),
        ropes=traits.ropes,
        logit_cap=text.final_logit_softcapping,
        unread_prefixes=_IMAGE_PARTS if is_wrapper else (),
    )


def _check(config: Any) -> None:
    """Raises ModelLoadError for what no member has."""
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise ModelLoadError(
            "the native Gemma family has gelu_pytorch_tanh activations only, not "
            f"{config.hidden_activation!r}"
        )
    if config.attention_bias:
        raise ModelLoadError("the native Gemma family has no attention_bias")
    if config.use_bidirectional_attention:
        raise ModelLoadError("the native Gemma family does not attend in both directions")
    unknown = sorted(set(config.layer_types) - {_FULL, _WINDOWED})
    if unknown or (_WINDOWED in config.layer_types and config.sliding_window is None):
        raise ModelLoadError(f"layer_types {config.layer_types} cannot be served as configured")


def _layers(config: Any, cap: float) -> tuple[LayerAttentionConfig, ...]:
    windows = {_FULL: -1, _WINDOWED: config.sliding_window}
    return tuple(
        LayerAttentionConfig(sliding_window_size=windows[kind], logit_cap=cap)
        for kind in config.layer_types
    )
