"""Tiny models whose heads are as wide as fused kernels want them."""

from pathlib import Path
from typing import Any

from tests.fakes.tiny_models import (
    GEMMA,
    LATENT,
    TINY_MODELS,
    TinyModel,
    gemma3_with_images,
    save_random_model,
    tiny_config,
)

WINDOW = 40
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GEMMA = {
    **{**_HEADS, "head_dim": 256, "hidden_size": 320},
    "intermediate_size": 640,
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
    "initializer_range": 0.06,
}
_OWN = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "llama4": {"attention_chunk_size": WINDOW},
}


def save_wide_model(name: str, folder: Path) -> Path:
    """name: of TINY_MODELS."""
    return save_random_model(_config(name), folder)


def _config(name: str) -> Any:
    if name == "gemma3_with_images":
        config = gemma3_with_images()
        for field, value in _GEMMA.items():
            setattr(config.text_config, field, value)
        return config
    tiny = TINY_MODELS[name]
    wide = _LATENT if name in LATENT else _GEMMA if name in GEMMA else _HEADS
    own = _OWN.get(name, {})
    return tiny_config(TinyModel(tiny.model_type, {**tiny.changes, **wide, **own}))
