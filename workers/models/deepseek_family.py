"""Models with multi-head latent attention as DeepSeek-V2 has it, read from Hugging Face configs.

One function a model_type, each returns what is its own; the model itself never asks which one it
is. Knows no tensors and imports no code of a model from transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention import LatentEntry
from workers.errors import ModelLoadError
from workers.layers.moe.spec import MixtureSpec
from workers.layers.rope_frequencies import RopeSpec, yarn_magnitude
from workers.models.llama_family import rope_spec
from workers.models.mixtures import deepseek_v2_mixture, first_layers, grouped_mixture

_LATENT_NORM_EPS = 1e-6  # of the norms before up-projections, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class DeepseekSpec:
    """A pre-norm decoder with latent attention, whose layers are dense or mixtures of experts.

    nope_dim: elements of a query or key head that are not rotated. q_lora_rank: of the compressed
    query, None where queries are projected at once. is_interleaved: whether neighbouring elements
    are rotated together. mixture: what layers but the dense_layers have in place of the MLP, None
    for none. num_extra_layers: layers behind the last one in the checkpoint, for multi-token
    prediction.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    nope_dim: int
    v_head_dim: int
    entry: LatentEntry
    q_lora_rank: int | None
    rms_norm_eps: float
    latent_norm_eps: float
    rope: RopeSpec
    is_interleaved: bool
    scaling: float
    has_attention_bias: bool
    has_mlp_bias: bool
    has_tied_embeddings: bool
    dense_layers: frozenset[int]
    mixture: MixtureSpec | None
    num_extra_layers: int

    @property
    def qk_head_dim(self) -> int:
        return self.nope_dim + self.entry.rope_dim


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a model_type adds to the fields all of them share."""

    is_interleaved: bool
    has_mlp_bias: bool
    dense_layers: frozenset[int]
    mixture: MixtureSpec | None


def _deepseek_v2(config: Any) -> _Traits:
    return _Traits(
        is_interleaved=True,
        has_mlp_bias=config.mlp_bias,
        dense_layers=first_layers(config.first_k_dense_replace, config),
        mixture=deepseek_v2_mixture(config),
    )


def _deepseek_v3(config: Any) -> _Traits:
    return _Traits(
        is_interleaved=config.rope_interleave,
        has_mlp_bias=False,
        dense_layers=first_layers(config.first_k_dense_replace, config),
        mixture=grouped_mixture(config),
    )


def _glm4_moe_lite(config: Any) -> _Traits:
    kinds = enumerate(config.mlp_layer_types)
    return _Traits(
        is_interleaved=config.rope_interleave,
        has_mlp_bias=False,
        dense_layers=frozenset(layer for layer, kind in kinds if kind != "sparse"),
        mixture=grouped_mixture(config),
    )


def _youtu(config: Any) -> _Traits:
    return _Traits(
        is_interleaved=config.rope_interleave,
        has_mlp_bias=False,
        dense_layers=first_layers(config.num_hidden_layers, config),
        mixture=None,
    )


_TRAITS: dict[str, Callable[[Any], _Traits]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "youtu": _youtu,
}


def softmax_scaling(rope: RopeSpec, qk_head_dim: int) -> float:
    """1 / sqrt(qk_head_dim), times YaRN's magnitude for mscale_all_dim squared: once for the query,
    once for the key, of which only a part is rotated and could carry it."""
    weight = rope.parameters.get("mscale_all_dim")
    if rope.rope_type == "default" or not weight:
        return float(qk_head_dim**-0.5)
    return float(qk_head_dim**-0.5 * yarn_magnitude(rope.factor, weight) ** 2)


def deepseek_obstacle(config: Any) -> str | None:
    """Why the native family cannot run a config that names one of its architectures."""
    try:
        deepseek_spec(config)
    except ModelLoadError as error:
        return str(error)
    return None


def deepseek_spec(config: Any) -> DeepseekSpec:
    """The spec of a transformers config of a member. Raises ModelLoadError if it has oddities."""
    if config.model_type not in _TRAITS:
        raise ModelLoadError(f"model_type {config.model_type!r} is not of the DeepSeek family")
    if config.hidden_act != "silu":
        raise ModelLoadError(
            f"the native DeepSeek family has silu activations only, not {config.hidden_act!r}"
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise ModelLoadError("heads that share a latent have as many K and V heads as queries")
    rope = rope_spec(config, config.qk_rope_head_dim)
    if rope.rotary_dim != config.qk_rope_head_dim:
        raise ModelLoadError("the rotated part of a key is rotated as a whole")
    traits = _TRAITS[config.model_type](config)
    return DeepseekSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        v_head_dim=config.v_head_dim,
        entry=LatentEntry(config.kv_lora_rank, config.qk_rope_head_dim),
        q_lora_rank=config.q_lora_rank,
        rms_norm_eps=config.rms_norm_eps,
        latent_norm_eps=_LATENT_NORM_EPS,
        rope=rope,
        is_interleaved=traits.is_interleaved,
        scaling=softmax_scaling(rope, config.qk_nope_head_dim + config.qk_rope_head_dim),
        has_attention_bias=config.attention_bias,
        has_mlp_bias=traits.has_mlp_bias,
        has_tied_embeddings=config.tie_word_embeddings,
        dense_layers=traits.dense_layers,
        mixture=traits.mixture,
        num_extra_layers=getattr(config, "num_nextn_predict_layers", None) or 0,
    )
