"""Tiny random models with eyes, and transformers' own answers to prompts with images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from workers.engine.content import ContentSpan
from workers.engine.media import ImagePatches

VOCAB_SIZE = 128
PLACEHOLDER, START, END, VIDEO = 120, 121, 122, 123
PATCH_VALUES = 3 * 2 * 4 * 4
MERGE = 2

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [2, 3, 3],
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EYES = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "in_channels": 3}
VISION = {
    # A window of 2 x 2 squares: layers that see one and layers that see all.
    "qwen2_5_vl": {
        **_EYES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {**_EYES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens with images in them."""

    ids: list[int]
    spans: list[ContentSpan]
    images: list[ImagePatches]


def save_vision_model(
    folder: Path, model_type: str = "qwen2_5_vl", vocab_size: int = VOCAB_SIZE, first: int = 120
) -> Path:
    """float32, with weights that make every mechanism show. first: of four tokens in a row, as
    PLACEHOLDER and what comes behind it."""
    config = AutoConfig.for_model(
        model_type,
        text_config={**_TEXT, "vocab_size": vocab_size},
        vision_config=VISION[model_type],
        image_token_id=first,
        vision_start_token_id=first + 1,
        vision_end_token_id=first + 2,
        video_token_id=first + 3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.15
            parameter.data.copy_(noise if parameter.dim() > 1 else 1.0 + noise)
    model.save_pretrained(folder)
    return folder


def vision_reference(folder: Path) -> PreTrainedModel:
    """transformers' own, float32, with its eager attention."""
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def image(seed: int, height: int, width: int) -> ImagePatches:
    """height, width: in patches."""
    patches = np.random.default_rng(seed).standard_normal((height * width, PATCH_VALUES))
    return ImagePatches.of(bytes([seed]) * 16, height, width, patches)


def prompt_of(*parts: int | ImagePatches, seed: int = 0) -> Prompt:
    """parts: so many random tokens of text, or an image between its marks."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    spans: list[ContentSpan] = []
    images: dict[bytes, ImagePatches] = {}
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, PLACEHOLDER, part).tolist()
            continue
        num_tokens = part.num_patches // MERGE**2
        spans.append(ContentSpan(len(ids) + 1, num_tokens, part.digest))
        images[part.digest] = part
        ids += [START, *[PLACEHOLDER] * num_tokens, END]
    return Prompt(ids, spans, list(images.values()))


def _inputs(prompt: Prompt, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """What transformers' processor would give the model."""
    tokens = torch.tensor([ids])
    if not prompt.spans:
        return {"input_ids": tokens}
    by_digest = {one.digest: one for one in prompt.images}
    shown = [by_digest[span.digest] for span in prompt.spans]
    return {
        "input_ids": tokens,
        "pixel_values": torch.from_numpy(np.concatenate([one.patches for one in shown])),
        "image_grid_thw": torch.tensor([[1, one.grid_height, one.grid_width] for one in shown]),
        "mm_token_type_ids": (tokens == PLACEHOLDER).int(),
    }


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, prompt: Prompt) -> torch.Tensor:
    """(tokens, vocab_size)."""
    reference.model.rope_deltas = None
    inputs = {
        name: tensor.to(reference.device) for name, tensor in _inputs(prompt, prompt.ids).items()
    }
    logits: torch.Tensor = reference(**inputs, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(reference: PreTrainedModel, prompt: Prompt, num_tokens: int) -> list[int]:
    """What generate() says, end of sequence or not."""
    reference.model.rope_deltas = None
    inputs = _inputs(prompt, prompt.ids)
    out = reference.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    return out[0, len(prompt.ids) :].tolist()
