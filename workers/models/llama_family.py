"""What tells the members of the Llama family apart, read from their Hugging Face configs.

One function a model_type, each returns the same frozen spec; the model itself never asks which
member it is. Knows no tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attention import LayerAttentionConfig
from workers.errors import ModelLoadError
from workers.layers.moe.spec import MixtureSpec
from workers.layers.rope_frequencies import ROPE_TYPES, RopeSpec
from workers.models.mixtures import (
    first_layers,
    gpt_oss_mixture,
    grouped_mixture,
    mixtral_mixture,
    qwen2_mixture,
    qwen3_mixture,
    qwen_dense_layers,
)


@dataclass(frozen=True, slots=True)
class LlamaFamilySpec:
    """A pre-norm decoder with rotary positions, grouped-query attention and a SwiGLU block.

    mixture: what layers but the dense_layers have in its place, None for none. num_extra_layers:
    layers behind the last one in the checkpoint, for multi-token prediction.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool
    layers: tuple[LayerAttentionConfig, ...]
    mixture: MixtureSpec | None = None
    dense_layers: frozenset[int] = frozenset()
    num_extra_layers: int = 0

    @property
    def has_sinks(self) -> bool:
        """Whether heads have learned logits that no value belongs to."""
        return self.layers[0].has_sinks

    @property
    def scaling(self) -> float:
        """The factor of attention's scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a model_type adds to the fields all members share."""

    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    layers: tuple[LayerAttentionConfig, ...]
    mixture: MixtureSpec | None = None
    dense_layers: frozenset[int] = frozenset()
    num_extra_layers: int = 0


def _uniform_layers(config: Any, sliding_window: int | None) -> tuple[LayerAttentionConfig, ...]:
    # Hugging Face keeps a key when query - key < sliding_window: window keys, the query's included.
    layer = LayerAttentionConfig(sliding_window_size=sliding_window or -1)
    num_layers: int = config.num_hidden_layers
    return (layer,) * num_layers


def _typed_layers(config: Any, has_sinks: bool = False) -> tuple[LayerAttentionConfig, ...]:
    """Layers by config.layer_types, which Hugging Face derives from max_window_layers."""
    kinds = {"full_attention": LayerAttentionConfig(has_sinks=has_sinks)}
    if config.sliding_window is not None:
        kinds["sliding_attention"] = LayerAttentionConfig(
            sliding_window_size=config.sliding_window, has_sinks=has_sinks
        )
    unknown = set(config.layer_types) - set(kinds)
    if unknown:
        raise ModelLoadError(f"layer_types {sorted(unknown)} cannot be served as configured")
    return tuple(kinds[kind] for kind in config.layer_types)


def _llama(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=config.attention_bias,
        has_o_bias=config.attention_bias,
        has_mlp_bias=config.mlp_bias,
        has_qk_norm=False,
        layers=_uniform_layers(config, None),
    )


def _mistral(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        layers=_uniform_layers(config, config.sliding_window),
    )


def _qwen2(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=True,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        layers=_typed_layers(config),
    )


def _qwen3(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=config.attention_bias,
        has_o_bias=config.attention_bias,
        has_mlp_bias=False,
        has_qk_norm=True,
        layers=_typed_layers(config),
    )


def _mixtral(config: Any) -> _Traits:
    return replace(_mistral(config), mixture=mixtral_mixture(config))


def _qwen2_moe(config: Any) -> _Traits:
    return replace(
        _qwen2(config),
        has_qkv_bias=config.qkv_bias,
        mixture=qwen2_mixture(config),
        dense_layers=qwen_dense_layers(config),
    )


def _qwen3_moe(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=config.attention_bias,
        has_o_bias=config.attention_bias,
        has_mlp_bias=False,
        has_qk_norm=True,
        layers=_uniform_layers(config, config.sliding_window),
        mixture=qwen3_mixture(config),
        dense_layers=qwen_dense_layers(config),
    )


def _gpt_oss(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=config.attention_bias,
        has_o_bias=config.attention_bias,
        has_mlp_bias=False,
        has_qk_norm=False,
        layers=_typed_layers(config, has_sinks=True),
        mixture=gpt_oss_mixture(config),
    )


def _glm4_moe(config: Any) -> _Traits:
    return _Traits(
        has_qkv_bias=config.attention_bias,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=config.use_qk_norm,
        layers=_uniform_layers(config, None),
        mixture=grouped_mixture(config),
        dense_layers=first_layers(config.first_k_dense_replace, config),
        num_extra_layers=getattr(config, "num_nextn_predict_layers", None) or 0,
    )


_TRAITS: dict[str, Callable[[Any], _Traits]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
}


def rope_spec(config: Any, head_dim: int) -> RopeSpec:
    """Rope parameters of a Hugging Face config, which has one rope for all its layers.

    Configs in the older shape (rope_theta, rope_scaling) reach this function with rope_parameters:
    transformers converts them when it reads them. Raises ModelLoadError for an unknown variant.
    """
    return rope_spec_of(config.rope_parameters, config.max_position_embeddings, head_dim)


def rope_spec_of(
    rope_parameters: Mapping[str, Any], max_position_embeddings: int, head_dim: int
) -> RopeSpec:
    """The same of one kind of layer's parameters. Raises ModelLoadError for an unknown variant."""
    parameters = dict(rope_parameters)
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(f"rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    return RopeSpec(
        rope_type=rope_type,
        theta=float(parameters["rope_theta"]),
        rotary_dim=int(head_dim * (parameters.get("partial_rotary_factor") or 1.0)),
        max_position_embeddings=max_position_embeddings,
        parameters=parameters,
    )


def native_obstacle(config: Any) -> str | None:
    """Why the native family cannot run a config that names one of its architectures."""
    try:
        llama_family_spec(config)
    except ModelLoadError as error:
        return str(error)
    return None


def llama_family_spec(config: Any) -> LlamaFamilySpec:
    """The spec of a transformers config of a member. Raises ModelLoadError if it has oddities."""
    if config.model_type not in _TRAITS:
        raise ModelLoadError(f"model_type {config.model_type!r} is not of the Llama family")
    if config.hidden_act != "silu":
        raise ModelLoadError(
            f"the native Llama family has silu activations only, not {config.hidden_act!r}"
        )
    traits = _TRAITS[config.model_type](config)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return LlamaFamilySpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_spec(config, head_dim),
        has_qkv_bias=traits.has_qkv_bias,
        has_o_bias=traits.has_o_bias,
        has_mlp_bias=traits.has_mlp_bias,
        has_qk_norm=traits.has_qk_norm,
        has_tied_embeddings=config.tie_word_embeddings,
        layers=traits.layers,
        mixture=traits.mixture,
        dense_layers=traits.dense_layers,
        num_extra_layers=traits.num_extra_layers,
    )
