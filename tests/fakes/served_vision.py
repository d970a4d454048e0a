"""A tiny Qwen2.5-VL with everything that a service needs, and transformers' answers."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.fakes.tiny_vision import save_vision_model
from tests.fakes.tokenizer_folders import make_byte_level_folder

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
EYE_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 64 * 24,
}
END_OF_TURN = 2


def save_vision_text(folder: Path, preprocessor: dict[str, Any]) -> int:
    """Tokenizer, template and what is said of images; the first of EYE_TOKENS."""
    make_byte_level_folder(folder, TEMPLATE)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(list(EYE_TOKENS))
    tokenizer.save(str(path))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    config = {"model_type": "qwen2_5_vl", "image_token_id": first}
    (folder / "config.json").write_text(json.dumps(config))
    return first


def save_served_vision(folder: Path, model_type: str = "qwen2_5_vl") -> Path:
    first = save_vision_text(folder, PREPROCESSOR)
    save_vision_model(folder, model_type, vocab_size=first + 8, first=first)
    generation = {"eos_token_id": END_OF_TURN, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def prompt_text(*parts: str | Image.Image) -> str:
    """What the template makes of one message of a user, with one placeholder for each image."""
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    shown = "".join(part if isinstance(part, str) else mark for part in parts)
    return f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"


@torch.inference_mode()
def reference_text(
    folder: Path, reference: PreTrainedModel, parts: list[str | Image.Image], max_tokens: int
) -> tuple[str, int]:
    """What generate() says greedily to a user's message, and the prompt's number of tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    placeholder = tokenizer.token_to_id(EYE_TOKENS[0])
    images = [part for part in parts if isinstance(part, Image.Image)]
    seen = Qwen2VLImageProcessorPil(**PREPROCESSOR)(images=images, return_tensors="pt")
    counts = (seen["image_grid_thw"].prod(-1) // PREPROCESSOR["merge_size"] ** 2).tolist()
    text = prompt_text(*parts)
    for count in counts:
        text = text.replace(EYE_TOKENS[0], "<|held|>" * count, 1)
    text = text.replace("<|held|>", EYE_TOKENS[0])
    ids = torch.tensor([tokenizer.encode(text).ids])
    reference.model.rope_deltas = None
    out = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=seen["pixel_values"],
        image_grid_thw=seen["image_grid_thw"],
        mm_token_type_ids=(ids == placeholder).int(),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return tokenizer.decode(out[0, ids.shape[1] :].tolist()), ids.shape[1]
