"""Tiny random encoder-decoders, made by transformers and saved as safetensors folders, and what
transformers itself makes of an input.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from workers.engine.encoder_input import EncoderInput, SourceFeatures, SourceTokens

VOCAB_SIZE = 131
MAX_POSITIONS = 192
NUM_BINS, NUM_FRAMES = 8, 100

_LAYERS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "use_cache": True,
}
_TEXT = {**_LAYERS, "max_position_embeddings": MAX_POSITIONS}
CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {**_TEXT, "scale_embedding": True},
    "mbart": _TEXT,
    "marian": {**_TEXT, "decoder_vocab_size": VOCAB_SIZE},
    "pegasus": _TEXT,
    "plbart": _TEXT,
    "blenderbot": _TEXT,
    "blenderbot-small": _TEXT,
    "whisper": {
        **_LAYERS,
        "max_source_positions": NUM_FRAMES // 2,
        "max_target_positions": MAX_POSITIONS,
        "num_mel_bins": NUM_BINS,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    },
}


def build(model_type: str) -> PreTrainedModel:
    """In float32, with weights large enough that every part shows in the logits."""
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    auto = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    torch.manual_seed(3)
    return auto.from_config(config).eval()


def save(model_type: str, folder: Path) -> Path:
    build(model_type).save_pretrained(folder)
    return folder


def random_source(model_type: str, num_tokens: int, seed: int) -> EncoderInput:
    """num_tokens: of a text; features have one length."""
    rng = np.random.default_rng(seed)
    if model_type == "whisper":
        return SourceFeatures.of(rng.normal(size=(NUM_BINS, NUM_FRAMES)) * 2)
    return SourceTokens(rng.integers(3, VOCAB_SIZE, num_tokens).tolist())


@dataclass(frozen=True)
class Truth:
    """token_ids: of transformers' greedy generate(). logprobs: float32 (n, vocab_size), of a pass
    over the whole text without a cache."""

    token_ids: list[int]
    logprobs: torch.Tensor

    @property
    def token_logprobs(self) -> torch.Tensor:
        """float32 (n,), those of the tokens."""
        return self.logprobs.gather(1, torch.tensor(self.token_ids)[:, None])[:, 0]


class Reference:
    """transformers' own code, eager and without this repository.

    repetition_penalty: random models repeat themselves, which would prove little.
    """

    def __init__(self, model_type: str, num_tokens: int, repetition_penalty: float) -> None:
        self._model = build(model_type)
        self._num_tokens = num_tokens
        self._repetition_penalty = repetition_penalty
        self._truths: dict[tuple[str, tuple[int, ...]], Truth] = {}

    def truth(self, source: EncoderInput, prompt: tuple[int, ...]) -> Truth:
        key = source.digest, prompt
        if key not in self._truths:
            self._truths[key] = self._compute(source, prompt)
        return self._truths[key]

    @torch.inference_mode()
    def _compute(self, source: EncoderInput, prompt: tuple[int, ...]) -> Truth:
        name, given = _arguments(source)
        # Whisper's own generate() deals with long audio and timestamps, around this one.
        whole = GenerationMixin.generate(
            self._model,
            given,
            decoder_input_ids=torch.tensor([prompt]),
            do_sample=False,
            num_beams=1,
            max_new_tokens=self._num_tokens,
            eos_token_id=None,
            repetition_penalty=self._repetition_penalty,
        )[:, -len(prompt) - self._num_tokens :]
        logits = self._model(**{name: given}, decoder_input_ids=whole).logits[0].float()
        predicted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return Truth(whole[0, len(prompt) :].tolist(), predicted)


def _arguments(source: EncoderInput) -> tuple[str, torch.Tensor]:
    if isinstance(source, SourceFeatures):
        return "input_features", torch.from_numpy(source.array.copy())[None]
    return "input_ids", torch.tensor([source.token_ids])
