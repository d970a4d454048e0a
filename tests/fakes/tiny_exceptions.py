"""What the field names of some families do not tell of a tiny config, by model_type."""

from collections.abc import Mapping
from typing import Any


def _mrope(*sections: int, rope_theta: float = 10000.0) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": rope_theta, "mrope_section": list(sections)}
    return {"rope_parameters": rope}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_CONV_AND_ATTENTION = {"layer_types": ["conv", "full_attention"] * 2}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
_FULL_AND_SLIDING = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_VOCABULARY = {"<image>": 96, "<|image token|>": 96, "<|extra_200|>": 97, "IMGIMG": 98}

_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_SMALL_SWA = {
    **dict.fromkeys(["swa_num_attention_heads", "swa_num_key_value_heads"], 4),
    **dict.fromkeys(["swa_q_lora_rank", "swa_kv_lora_rank"], 32),
    **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16},
}
_FEW_CHANNELS = {"base_channels": 32, "channel_multiplier": [1, 1]}
_SMALL_QUANTISER = {**_FEW_CHANNELS, "latent_channels": 32, "num_embeddings": 16}

NEEDED: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        }
    }
}
"""Without which the config of a model_type is none: its class refuses its own defaults."""

EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ["qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "glm4v_text", "glm_ocr_text"],
        _mrope(2, 3, 3),
    ),
    **dict.fromkeys(["cosmos3_edge_text", "qwen2_5_omni_text"], _mrope(2, 3, 3)),
    "bamba": {"attn_layer_indices": [1, 3], **_SMALL_MAMBA},
    "chameleon": {"vocabulary_map": _VOCABULARY},
    "chameleon_vqgan": _SMALL_QUANTISER,
    "cohere_compass_text": {"rope_parameters": _FULL_AND_SLIDING},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_text": {"index_topk": 16, "shared_experts_intermediate_size": 32, **_SMALL_SWA},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": {"vocabulary_map": _VOCABULARY},
    "emu3_vqgan": {**_FEW_CHANNELS, "codebook_size": 16},
    "ernie4_5_vl_moe_text": _mrope(3, 3, 2),
    "gemma3n_text": {
        "layer_types": _SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
    },
    **dict.fromkeys(
        ["gemma4_text", "gemma4_unified_text"],
        {
            "layer_types": _SLIDING_AND_FULL,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "glm4v_moe_text": _mrope(1, 1, 2),
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **_SMALL_MAMBA},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    **dict.fromkeys(["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"], {"index_topk": 16}),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "llama4_text": {"attention_chunk_size": 9, "floor_scale": 8},
    "janus_vqgan": {**_SMALL_QUANTISER, "image_token_embed_dim": 64},
    "lfm2": _CONV_AND_ATTENTION,
    "lfm2_moe": _CONV_AND_ATTENTION,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [2, 1]},
    "muse_spark_audio": {"hidden_sizes": [16, 16, 16, 16], "num_hidden_layers": 4},
    "muse_spark_text": {"moe_hidden_size": 64},
    **dict.fromkeys(
        ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"], {"vision_start_token_id": 120}
    ),
    "gemma4_assistant": {
        "text_config": {
            **{"model_type": "gemma4_text", "layer_types": _SLIDING_AND_FULL, "vocab_size": 128},
            **{"num_hidden_layers": 4, "num_kv_shared_layers": 4, "max_position_embeddings": 256},
            **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
            **dict.fromkeys(["hidden_size_per_layer_input", "vocab_size_per_layer_input"], 0),
        }
    },
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"sliding_window": 9},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
