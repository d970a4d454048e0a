"""Tiny random models that are an encoder alone, saved as safetensors folders, and what transformers
itself makes of one text at a time.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

VOCAB_SIZE = 131
MAX_POSITIONS = 66
HIDDEN_SIZE = 64
KINDS = {
    "body": MODEL_MAPPING,
    "masked": MODEL_FOR_MASKED_LM_MAPPING,
    "classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "mask_token_id": 4,
}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
_PAIRS = {"type_vocab_size": 2}
# Windows are shorter than the texts, and not in every layer.
_WINDOWS = {"local_attention": 8, "global_attn_every_n_layers": 2}
_DISTIL = {"dim": HIDDEN_SIZE, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}
CHANGES: dict[str, dict[str, Any]] = {
    "bert": _PAIRS,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": _WINDOWS,
    "nomic_bert": _PAIRS,
    "distilbert": _DISTIL,
    "mpnet": {"pad_token_id": 1},
    "electra": {**_PAIRS, "embedding_size": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "convbert": _PAIRS,
}


def save_tiny_encoder(
    model_type: str, folder: Path, kind: str = "body", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The model that was saved into the folder, in eval mode; files there stay."""
    config = AutoConfig.for_model(model_type, **{**_SHARED, **CHANGES[model_type]})
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model: PreTrainedModel = KINDS[kind][type(config)](config).eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def one_by_one(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], second_start: int = 0
) -> list[np.ndarray]:
    """Of each text float32 final states (n, hidden_size), or a classifier's logits (num_labels,).
    second_start: from where on tokens are of type 1, where the model tells types apart."""
    takes = inspect.signature(model.forward).parameters
    has_types = second_start and "token_type_ids" in takes and model.config.type_vocab_size > 1
    results = []
    for text in texts:
        more = {}
        if has_types:
            types = [0] * second_start + [1] * (len(text) - second_start)
            more = {"token_type_ids": torch.tensor([types])}
        output = model(input_ids=torch.tensor([list(text)]), **more)
        value = output.logits if "logits" in output else output.last_hidden_state
        results.append(value[0].numpy())
    return results
