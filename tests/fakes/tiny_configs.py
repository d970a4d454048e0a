"""Any config of transformers made tiny: found by field names, with exceptions for a few families.

What the configs have in common is what their fields are called. The result is small enough to be
built in a moment, and has each kind of layer that the full one has.
"""

from collections.abc import Mapping
from dataclasses import fields
from itertools import count
from typing import Any

from transformers import PreTrainedConfig

from tests.fakes.tiny_exceptions import EXCEPTIONS

VOCAB_SIZE = 128
FIRST_SPECIAL_TOKEN = 96  # ids from here on may mean an image or a sound
MAX_POSITIONS = 256
NUM_LAYERS = 4
NUM_HEADS = 4

_BY_NAME: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCAB_SIZE, ("vocab_size", "text_vocab_size")),
    (
        MAX_POSITIONS,
        (
            *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length"),
            *("seq_length", "max_target_positions", "max_sequence_length", "model_max_length"),
        ),
    ),
    (
        NUM_LAYERS,
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
            *("encoder_layers", "num_decoder_layers", "depth", "num_encoder_layers"),
        ),
    ),
    (
        64,
        (
            *("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"),
            *("word_embed_proj_dim", "projection_dim", "out_hidden_size", "lm_head_hidden_size"),
            *("text_hidden_size", "embed_size", "hidden_dim", "emb_dim", "projector_hidden_size"),
        ),
    ),
    (
        96,
        (
            *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "mlp_dim"),
            *("dense_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "d_inner"),
            "intermediate_size_mlp",
        ),
    ),
    (
        32,
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"),
            *("kv_lora_rank", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("shared_intermediate_size",),
        ),
    ),
    (
        4,
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"),
            *("moe_num_experts",),
        ),
    ),
    (
        2,
        (
            *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads"),
            *("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_experts_per_token"),
        ),
    ),
    (
        16,
        ("head_dim", "v_head_dim", "attention_head_dim", "kv_channels", "d_kv", "global_head_dim"),
    ),
    (8, ("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim")),
    (1, ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace")),
    (9, ("sliding_window", "window_size_left")),
    (0, ("pad_token_id", "padding_idx")),
)
_SIZES = {name: value for value, names in _BY_NAME for name in names}
_FIXED = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    # They would stand where other tokens are asked for.
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}

# Sizes that a class leaves open and then cannot do without.
_NEEDED = {
    "head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "num_key_value_heads",
}


def tiny_config(
    default: PreTrainedConfig, of_caller: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """A config of the same class, tiny. Raises what the class raises where it does not fit."""
    if hasattr(default, "allow_global_per_layer_attribute_access"):
        default.allow_global_per_layer_attribute_access = True
    changes = _changes(default)
    changes.update(EXCEPTIONS.get(default.model_type, {}))
    changes.update(of_caller or {})
    return type(default)(**changes)


def _changes(default: PreTrainedConfig) -> dict[str, Any]:
    """The fields that say how large it is, and those that name tokens."""
    names = [field.name for field in fields(default)]  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    special_tokens = count(FIRST_SPECIAL_TOKEN)
    for name in names:
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            changes[name] = tiny_config(value)
        elif name in _FIXED:
            changes[name] = _FIXED[name]
        elif name in _SIZES and _is_size(name, value):
            changes[name] = _SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and _is_int(value):
            changes[name] = next(special_tokens)
        elif isinstance(value, list) and value and len(value) == _num_layers(default):
            changes[name] = _of_every_kind(value)
    if "qk_rope_head_dim" in names:  # latent attention
        latent = {"head_dim": changes["qk_rope_head_dim"], "num_key_value_heads": NUM_HEADS}
        changes.update({name: value for name, value in latent.items() if name in names})
    return changes


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(name: str, value: Any) -> bool:
    return _is_int(value) or (value is None and name in _NEEDED)


def _num_layers(config: Any) -> int | None:
    return getattr(config, "num_hidden_layers", None)


def _of_every_kind(of_layers: list[Any]) -> list[Any]:
    """NUM_LAYERS values that have every kind there is, in the order of their first layers."""
    kinds: list[Any] = []
    for kind in of_layers:
        if kind not in kinds:
            kinds.append(kind)
    return [kinds[layer_id % len(kinds)] for layer_id in range(NUM_LAYERS)]
