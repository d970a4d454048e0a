"""One tiny model of every family of memory that the engine knows, for tests of all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.reference_family import Family
from tests.fakes.tiny_configs import NUM_HEADS
from tests.fakes.tiny_models import GEMMA, LATENT
from tests.fakes.tiny_state_models import STATE_MODELS
from workers.scheduler.snapshot_memory import BORDER_TOKENS

# Beyond a page of 64 tokens, and short; with their output they end at MAX_CONTEXT_LEN. Two of them
# alone outgrow the pages of all prompts.
PROMPT_LENGTHS = (127, 90, 5)


@dataclass(frozen=True, slots=True)
class FamilyModel:
    """changes: to the tiny config. border_tokens: a cached prefix ends at a multiple of it.
    has_delta_rule: transformers' own ways to compute differ by more than is usual."""

    model_type: str
    class_name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    border_tokens: int = 1
    has_delta_rule: bool = False

    def build(self, folder: Path) -> Family:
        return Family.of(self.model_type, self.class_name, self.changes, folder, PROMPT_LENGTHS)

    def build_served(self, folder: Path) -> Family:
        """With what a client of the service can ask."""
        return self.build(folder)


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """As FamilyModel, of a model that reads an input of its own."""

    model_type: str
    border_tokens: int = 1
    has_delta_rule: bool = False

    def build(self, folder: Path) -> Family:
        return Family.of_seq2seq(self.model_type, folder, lengths=PROMPT_LENGTHS)

    def build_served(self, folder: Path) -> Family:
        """The service gives the decoder its start, a client what the encoder reads."""
        return Family.of_seq2seq(self.model_type, folder, lengths=(1, 1, 1))


def _states(name: str) -> FamilyModel:
    class_name, changes = STATE_MODELS[name]
    return FamilyModel(name, class_name, changes, BORDER_TOKENS)


def _delta_rule(model_type: str, class_name: str) -> FamilyModel:
    _, changes = STATE_MODELS["qwen3_next"]
    return FamilyModel(model_type, class_name, changes, BORDER_TOKENS, has_delta_rule=True)


def _latent(name: str, class_name: str) -> FamilyModel:
    changes = {**LATENT[name].changes, "num_key_value_heads": NUM_HEADS}
    return FamilyModel(name, class_name, changes)


FAMILIES: Mapping[str, FamilyModel | EncoderDecoder] = {
    # One latent a token.
    "deepseek_v2": _latent("deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": _latent("deepseek_v3", "DeepseekV3ForCausalLM"),
    # Windows.
    "gemma2": FamilyModel("gemma2", "Gemma2ForCausalLM", GEMMA["gemma2"].changes),
    "gemma3": FamilyModel(
        "gemma3_text", "Gemma3ForCausalLM", {"num_hidden_layers": 3, **GEMMA["gemma3"].changes}
    ),
    "gpt_oss": FamilyModel("gpt_oss", "GptOssForCausalLM"),
    "mistral": FamilyModel("mistral", "MistralForCausalLM"),
    # Chunks.
    "llama4": FamilyModel("llama4_text", "Llama4ForCausalLM"),
    # Inputs of an encoder.
    "bart": EncoderDecoder("bart"),
    "whisper": EncoderDecoder("whisper"),
    # States.
    "mamba2": _states("mamba2"),
    "qwen3_next": _delta_rule("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": _delta_rule("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "falcon_h1": _states("falcon_h1"),
    "nemotron_h": _states("nemotron_h"),
    "lfm2": _states("lfm2"),
    # K and V of other layers.
    "gemma3n": FamilyModel("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4": FamilyModel("gemma4_text", "Gemma4ForCausalLM"),
}
