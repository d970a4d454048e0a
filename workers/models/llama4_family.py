"""What Llama 4's text is made of, read from its Hugging Face config.

Of a model for images and text it is the text part's. Knows no tensors.
"""

from dataclasses import dataclass
from typing import Any

from attention import LayerAttentionConfig
from workers.errors import ModelLoadError
from workers.layers.moe.spec import MixtureSpec
from workers.layers.rope_frequencies import RopeSpec
from workers.layers.temperature import PositionTemperature
from workers.models.llama_family import rope_spec
from workers.models.mixtures import llama4_mixture

_FULL, _CHUNKED = "full_attention", "chunked_attention"
_TEXT, _WITH_IMAGES = "llama4_text", "llama4"
_IMAGE_PARTS = ("vision_model.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class Llama4Spec:
    """A pre-norm decoder, some of whose layers rotate their heads and others do not.

    intermediate_size: of dense layers. rotated_layers: that rotate queries and keys, and then
    normalise both where has_qk_norm. temperature: of the others' queries, None for none.
    unread_prefixes: of names in the checkpoint that take no part in text.
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
    has_qk_norm: bool
    has_tied_embeddings: bool
    layers: tuple[LayerAttentionConfig, ...]
    rotated_layers: frozenset[int]
    temperature: PositionTemperature | None
    mixture: MixtureSpec
    dense_layers: frozenset[int]
    unread_prefixes: tuple[str, ...]

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


def llama4_obstacle(config: Any) -> str | None:
    """Why the native class cannot run a config that names one of its architectures."""
    try:
        llama4_spec(config)
    except ModelLoadError as error:
        return str(error)
    return None


def llama4_spec(config: Any) -> Llama4Spec:
    """The spec of a transformers config. Raises ModelLoadError if it has oddities."""
    is_wrapper = config.model_type == _WITH_IMAGES
    text = config.get_text_config() if is_wrapper else config
    if text.model_type != _TEXT:
        raise ModelLoadError(f"model_type {config.model_type!r} is no Llama 4")
    if text.hidden_act != "silu":
        raise ModelLoadError(f"Llama 4 has silu activations only, not {text.hidden_act!r}")
    if len(text.no_rope_layers) != text.num_hidden_layers:
        raise ModelLoadError(
            f"no_rope_layers says something of {len(text.no_rope_layers)} layers, the model has "
            f"{text.num_hidden_layers}"
        )
    all_layers = range(text.num_hidden_layers)
    return Llama4Spec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size_mlp,
        num_q_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rms_norm_eps=text.rms_norm_eps,
        rope=_whole_rope(text),
        has_qkv_bias=text.attention_bias,
        has_qk_norm=text.use_qk_norm,
        has_tied_embeddings=config.tie_word_embeddings,
        layers=_layers(text),
        rotated_layers=frozenset(i for i in all_layers if text.no_rope_layers[i]),
        temperature=_temperature(text),
        mixture=llama4_mixture(text),
        dense_layers=frozenset(set(all_layers) - set(text.moe_layers)),
        unread_prefixes=_IMAGE_PARTS if is_wrapper else (),
    )


def _whole_rope(config: Any) -> RopeSpec:
    rope = rope_spec(config, config.head_dim)
    if rope.rotary_dim != config.head_dim:
        raise ModelLoadError("Llama 4 rotates whole heads")
    return rope


def _temperature(config: Any) -> PositionTemperature | None:
    if not config.attn_temperature_tuning:
        return None
    return PositionTemperature(config.floor_scale, config.attn_scale)


def _layers(config: Any) -> tuple[LayerAttentionConfig, ...]:
    """By config.layer_types. Raises ModelLoadError where they say what cannot be."""
    kinds = {_FULL: LayerAttentionConfig()}
    chunk_size = config.attention_chunk_size
    if chunk_size is not None and chunk_size > 0:
        kinds[_CHUNKED] = LayerAttentionConfig(chunk_size=chunk_size)
    unknown = sorted(set(config.layer_types) - set(kinds))
    if unknown:
        raise ModelLoadError(
            f"layer_types {unknown} cannot be served with attention_chunk_size {chunk_size}"
        )
    return tuple(kinds[kind] for kind in config.layer_types)
