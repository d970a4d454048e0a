"""Attention of a model of transformers as its config states it. What it really is, shows when it
runs: nothing but a survey goes by this.
"""

from typing import Any

from transformers import PreTrainedConfig

from attention import LayerAttentionConfig
from workers.loading.model_folder import text_config_of
from workers.models.base import AttentionGeometry

_WINDOWS = {"sliding_attention", "hybrid_sliding"}
_CHUNKS = {"chunked_attention"}
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
_KEEP_TOKENS = {"full_attention", "attention", "hybrid", *_INDEXED, *_WINDOWS, *_CHUNKS}


def stated_geometry(config: PreTrainedConfig, tp_size: int) -> AttentionGeometry | None:
    """None where the config does not say. Keys and values of every head, also of models whose
    native code would keep latents."""
    text = text_config_of(config)
    sizes = [
        getattr(text, name, None)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    ]
    stated = [size for size in sizes if isinstance(size, int)]
    if config.is_encoder_decoder or len(stated) < len(sizes):
        return None
    num_layers, num_heads, hidden_size = stated
    head_dim = _head_dim(text, hidden_size // num_heads)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    layers = _layers(text, num_layers)
    if not layers or num_heads % tp_size or num_kv_heads % tp_size:
        return None
    v_head_dim = getattr(text, "v_head_dim", None) or head_dim
    return AttentionGeometry(
        num_heads // tp_size, num_kv_heads // tp_size, head_dim, v_head_dim, layers
    )


def _head_dim(text: Any, otherwise: int) -> int:
    parts = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(parts):
        return sum(part for part in parts if part is not None)
    return getattr(text, "head_dim", None) or otherwise


def _layers(text: Any, num_layers: int) -> tuple[LayerAttentionConfig, ...]:
    """Of those that keep tokens."""
    window = getattr(text, "sliding_window", None) or -1
    chunk = getattr(text, "attention_chunk_size", None) or -1
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return (LayerAttentionConfig(sliding_window_size=window),) * num_layers
    return tuple(
        LayerAttentionConfig(
            sliding_window_size=window if kind in _WINDOWS else -1,
            chunk_size=chunk if kind in _CHUNKS else -1,
        )
        for kind in kinds
        if kind in _KEEP_TOKENS
    )
