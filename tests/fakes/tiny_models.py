"""Tiny random models of many architectures, made by transformers and saved as safetensors folders.

They are large enough that every mechanism of their architecture shows in the logits, and small
enough that a test builds one in a fraction of a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 131  # no multiple of 2 or 4: tensor parallelism has to pad it
MAX_POSITIONS = 256
SLIDING_WINDOW = 9

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model_type and what its config changes in the shared tiny one."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

NATIVE: dict[str, TinyModel] = {
    "llama3": TinyModel("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama3_tied": TinyModel("llama", {"tie_word_embeddings": True}),
    "llama2_mha": TinyModel("llama", {"num_key_value_heads": 8}),
    "llama_biased": TinyModel("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_yarn": TinyModel("llama", {"rope_parameters": _YARN_ROPE}),
    "mistral": TinyModel("mistral", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": TinyModel("qwen2", {}),
    "qwen2_windowed": TinyModel(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    ),
    "qwen3": TinyModel("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

_LATENT_YARN_ROPE = {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 1.2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

LATENT: dict[str, TinyModel] = {
    "deepseek_v2": TinyModel(
        "deepseek_v2",
        {
            **_LATENT,
            **_EXPERTS,
            "topk_method": "group_limited_greedy",
            "rope_parameters": _LATENT_YARN_ROPE,
        },
    ),
    "deepseek_v2_lite": TinyModel("deepseek_v2", {**_LATENT, **_EXPERTS, "q_lora_rank": None}),
    "deepseek_v3": TinyModel(
        "deepseek_v3", {**_LATENT, **_EXPERTS, "rope_parameters": _LATENT_YARN_ROPE}
    ),
    "deepseek_v3_biased": TinyModel(
        "deepseek_v3",
        {**_LATENT, **_EXPERTS, "attention_bias": True, "rope_interleave": False},
    ),
    "glm4_moe_lite": TinyModel(
        "glm4_moe_lite", {**_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1}
    ),
    "youtu": TinyModel("youtu", {**_LATENT, "tie_word_embeddings": True}),
}

LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [0, 2],
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
"""Layers without rotation, with a temperature and all of the context: the last one."""

MIXTURES: dict[str, TinyModel] = {
    "mixtral": TinyModel(
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "qwen2_moe": TinyModel(
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": TinyModel(
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "gpt_oss": TinyModel(
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
    "glm4_moe": TinyModel(
        "glm4_moe",
        {
            "head_dim": 16,
            "num_key_value_heads": 2,
            **_EXPERTS,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "llama4": TinyModel("llama4_text", LLAMA4),
}

_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}
GEMMA: dict[str, TinyModel] = {
    "gemma2": TinyModel(
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "sliding_window": SLIDING_WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": TinyModel(
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
}
NATIVE |= GEMMA

THROUGH_TRANSFORMERS: dict[str, TinyModel] = {
    "phi3": TinyModel("phi3", {"sliding_window": None}),
    "phi3_windowed": TinyModel("phi3", {"sliding_window": SLIDING_WINDOW}),
    "gpt_neox": TinyModel("gpt_neox", {}),
    "olmo2": TinyModel("olmo2", {}),
    "gpt2": TinyModel("gpt2", {"n_positions": MAX_POSITIONS, "n_inner": 96}),
}

STATEFUL: dict[str, TinyModel] = {
    "qwen3_next": TinyModel(
        "qwen3_next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}

_WITH_IMAGES = TinyModel("gemma3")
TINY_MODELS: dict[str, TinyModel] = {
    **NATIVE,
    **LATENT,
    **MIXTURES,
    **STATEFUL,
    "gemma3_with_images": _WITH_IMAGES,
}
"""Of architectures that have a native class."""


def architecture_of(name: str) -> str:
    """Of one of TINY_MODELS, as its config.json names it."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TINY_MODELS[name].model_type])


def one_of_each() -> dict[str, str]:
    """Architecture -> the first of TINY_MODELS that is of it."""
    return {architecture_of(name): name for name in reversed(TINY_MODELS)}


def _randomise(model: PreTrainedModel) -> None:
    """Give biases, norms and sinks values too: initialised ones are zeros and ones, which hide."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            noise = torch.randn_like(parameter) * 0.2
            parameter.data.copy_(noise if name.endswith(("bias", "sinks")) else 1.0 + noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)


def tiny_config(tiny: TinyModel) -> Any:
    """The transformers config, freshly made."""
    if tiny == _WITH_IMAGES:
        return gemma3_with_images()
    return AutoConfig.for_model(tiny.model_type, **{**_SHARED, **tiny.changes})


def gemma3_with_images() -> Any:
    """A config whose text part is GEMMA["gemma3"]'s; no text here has its token for images."""
    eyes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28}
    return AutoConfig.for_model(
        "gemma3",
        text_config={**_SHARED, **GEMMA["gemma3"].changes},
        vision_config={**eyes, "num_attention_heads": 2, "patch_size": 14},
        image_token_index=0,
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
        eos_token_id=2,
    )


def save_tiny_model(
    tiny: TinyModel, folder: Path, seed: int = 0, max_shard_size: str = "1GB"
) -> Path:
    """Write config.json, generation_config.json and float32 safetensors; returns the folder."""
    return save_random_model(tiny_config(tiny), folder, seed, max_shard_size)


def save_random_model(
    config: Any, folder: Path, seed: int = 0, max_shard_size: str = "1GB"
) -> Path:
    """The same of any config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def eager_reference(folder: Path) -> PreTrainedModel:
    """transformers' own model of a saved folder, with its eager attention and experts, float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        local_files_only=True,
    )


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that are in every tiny model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
