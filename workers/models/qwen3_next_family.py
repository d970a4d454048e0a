"""What Qwen3-Next is made of, read from its Hugging Face config. Knows no tensors."""

from dataclasses import dataclass
from typing import Any

from attention import LayerAttentionConfig
from workers.errors import ModelLoadError
from workers.layers.delta.heads import DeltaHeads
from workers.layers.moe.spec import MixtureSpec
from workers.layers.rope_frequencies import RopeSpec
from workers.models.llama_family import rope_spec
from workers.models.mixtures import qwen2_mixture, qwen_dense_layers

_FULL, _LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class Qwen3NextSpec:
    """A pre-norm decoder, most of whose layers keep a state in place of keys and values.

    attending: the layers that attend, in order; layers: of these alone. intermediate_size: of dense
    layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    has_qkv_bias: bool
    has_tied_embeddings: bool
    attending: tuple[int, ...]
    layers: tuple[LayerAttentionConfig, ...]
    delta: DeltaHeads
    mixture: MixtureSpec
    dense_layers: frozenset[int]

    @property
    def has_o_bias(self) -> bool:
        return self.has_qkv_bias

    @property
    def has_mlp_bias(self) -> bool:
        return False

    @property
    def scaling(self) -> float:
        """The factor of attention's scores."""
        return float(self.head_dim**-0.5)


def qwen3_next_obstacle(config: Any) -> str | None:
    """Why the native class cannot run a config that names its architecture."""
    try:
        qwen3_next_spec(config)
    except ModelLoadError as error:
        return str(error)
    return None


def qwen3_next_spec(config: Any) -> Qwen3NextSpec:
    """The spec of a transformers config. Raises ModelLoadError if it has oddities."""
    if config.model_type != "qwen3_next":
        raise ModelLoadError(f"model_type {config.model_type!r} is no Qwen3-Next")
    if config.hidden_act != "silu":
        raise ModelLoadError(f"Qwen3-Next has silu activations only, not {config.hidden_act!r}")
    unknown = sorted(set(config.layer_types) - {_FULL, _LINEAR})
    attending = tuple(i for i, kind in enumerate(config.layer_types) if kind == _FULL)
    if unknown or not attending or len(attending) == len(config.layer_types):
        raise ModelLoadError(f"layer_types {config.layer_types} are not those of Qwen3-Next")
    return Qwen3NextSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_spec(config, config.head_dim),
        has_qkv_bias=config.attention_bias,
        has_tied_embeddings=config.tie_word_embeddings,
        attending=attending,
        layers=(LayerAttentionConfig(),) * len(attending),
        delta=_delta_heads(config),
        mixture=qwen2_mixture(config),
        dense_layers=qwen_dense_layers(config),
    )


def _delta_heads(config: Any) -> DeltaHeads:
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim"),
    )
    for name in sizes:
        if getattr(config, name) < 1:
            raise ModelLoadError(f"{name}={getattr(config, name)} is less than 1")
    if value_heads % key_heads:
        raise ModelLoadError(f"{value_heads} value heads do not share {key_heads} key heads")
    return DeltaHeads(
        key_heads,
        value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
