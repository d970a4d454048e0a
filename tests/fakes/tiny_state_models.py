"""Tiny models with convolution or recurrent states, and what transformers makes of some prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.fakes.tiny_reference import (
    BANNED_TOKENS,
    build_reference,
    config_of,
    greedy_tokens,
    random_prompt,
    reference_logits,
)
from workers.sampling.params import SamplingParams

# class, and what is changed in its tiny config: small states, chunks that prompts have several of.
STATE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2ForCausalLM", {"chunk_size": 8, "state_size": 16}),  # no attention at all
    "qwen3_next": (  # the gated delta rule
        "Qwen3NextForCausalLM",
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "falcon_h1": (  # layers that attend and keep a state
        "FalconH1ForCausalLM",
        {
            **{"mamba_chunk_size": 8, "mamba_d_ssm": 128, "mamba_n_heads": 8},
            **{"mamba_d_head": 16, "mamba_d_state": 16},
        },
    ),
    "nemotron_h": (  # layers that do neither
        "NemotronHForCausalLM",
        {"chunk_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    ),
    "lfm2": ("Lfm2ForCausalLM", {}),  # convolutions alone
    "jamba": ("JambaForCausalLM", {}),  # takes tokens one by one on top of a state
}
PROMPT_LENGTHS = (1, 24, 41, 3)
NUM_OUTPUT_TOKENS = 44
MAX_CONTEXT_LEN = 256


def greedy(num_tokens: int = NUM_OUTPUT_TOKENS) -> SamplingParams:
    """With log probabilities of prompt and output."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
        logit_bias=dict.fromkeys(BANNED_TOKENS, -100.0),
    )


@dataclass(frozen=True, slots=True)
class TinyStateModel:
    """A saved model, prompts, and transformers' own greedy tokens after each."""

    folder: str
    reference: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of every token but the first, after those before it."""
        logits = reference_logits(self.reference, tokens).log_softmax(-1)
        return [float(logits[i, token]) for i, token in enumerate(tokens[1:])]


def save_state_model(model_type: str, folder: Path) -> PreTrainedModel:
    """The model that was saved, as transformers reads it."""
    class_name, changes = STATE_MODELS[model_type]
    return build_reference(config_of(model_type, class_name, changes), class_name, folder)


def tiny_state_model(model_type: str, folder: Path) -> TinyStateModel:
    reference = save_state_model(model_type, folder)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    expected = [greedy_tokens(reference, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    return TinyStateModel(str(folder), reference, prompts, expected)
