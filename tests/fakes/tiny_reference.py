"""A tiny random model of any architecture, saved to a folder and read back by transformers.

What it says is the measure: logits of one pass without a cache, greedy tokens of generate().
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tests.fakes.tiny_configs import FIRST_SPECIAL_TOKEN, VOCAB_SIZE, tiny_config
from tests.fakes.tiny_exceptions import NEEDED

MAX_PARAMETERS = 20_000_000
# Ends of sequences, padding, and what may stand for an image.
BANNED_TOKENS = [0, 1, 2, *range(FIRST_SPECIAL_TOKEN, VOCAB_SIZE)]


class NotBuiltError(Exception):
    """There is nothing to compare with."""


def config_of(model_type: str, class_name: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Raises NotBuiltError."""
    try:
        full = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
        config = tiny_config(full, changes)
    except Exception as error:
        raise NotBuiltError(f"config: {in_one_line(error)}") from error
    config.architectures = [class_name]
    return config


def build_reference(config: PreTrainedConfig, class_name: str, folder: Path) -> PreTrainedModel:
    """The model as it is read back from folder, having run once. Raises NotBuiltError."""
    try:
        save_random_model(config, class_name, folder)
        reference: PreTrainedModel = getattr(transformers, class_name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        logits = reference_logits(reference, random_prompt(5))
        greedy_tokens(reference, random_prompt(5), 2)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(in_one_line(error)) from error
    if not torch.isfinite(logits).all():
        raise NotBuiltError("its random weights give no finite logits")
    return reference


def save_random_model(config: PreTrainedConfig, class_name: str, folder: Path) -> None:
    """Builds it on the CPU and runs nothing: kernels that transformers finds may be a GPU's."""
    model_class = getattr(transformers, class_name)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    _check_size(model_class, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config, dtype=torch.float32).eval()
        _randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)


def _check_size(model_class: Any, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MAX_PARAMETERS:
        raise NotBuiltError(f"{size:,} parameters where all known sizes are tiny")


def _randomise(model: PreTrainedModel) -> None:
    """Weights that make every mechanism show: initial ones are near zero, zeros and ones."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.data.copy_(noise * 0.15)
            else:
                centre = 0.0 if "bias" in name or "sink" in name else 1.0
                parameter.data.copy_(noise * 0.2 + centre)


def random_prompt(num_tokens: int) -> list[int]:
    """Ordinary tokens, the same for the same length."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, FIRST_SPECIAL_TOKEN, (num_tokens,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """(len(tokens), vocabulary)"""
    ids = torch.tensor([tokens])
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own, from its own cache, none of them banned."""
    return greedy_output(model, prompt, num_tokens)[0]


def greedy_output(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """greedy_tokens, and the logits before each, (num_tokens, vocabulary): a step for each."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        suppress_tokens=BANNED_TOKENS,
        eos_token_id=2,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
    return tokens, torch.cat(output.logits).float()


def in_one_line(error: BaseException) -> str:
    """Its class and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
