"""A tiny model of some family, what transformers says to a few prompts, and the engine beside it.

Greedy tokens and the log probabilities of the whole vocabulary at each, in whatever way the engine
schedules them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import tiny_seq2seq
from tests.fakes.tiny_reference import (
    BANNED_TOKENS,
    build_reference,
    config_of,
    greedy_output,
    random_prompt,
    reference_logits,
)
from workers import Engine
from workers.config import EngineConfig
from workers.engine.encoder_input import EncoderInput
from workers.engine.protocol import EngineStats
from workers.engine.results import GenerateResult
from workers.sampling.params import SamplingParams
from workers.scheduler.output_forecast import OutputForecast

NUM_OUTPUT_TOKENS = 44
# Past windows and chunks, across pages: what differs between ways to run shows within these.
NUM_FIRST_TOKENS = 24
MAX_LOGPROB_ERROR = 1e-4
# The delta rule adds up in another order in chunks than step by step, in transformers too. Chunks
# of the engine begin elsewhere than those of one pass do.
MAX_ERROR_OF_SPREAD = 1.5
# As far as positions of the shortest go.
MAX_CONTEXT_LEN = tiny_seq2seq.MAX_POSITIONS
PROMPT_LENGTHS = (3, 20, 43)
# Random encoder-decoders repeat themselves, which would prove little.
REPETITION_PENALTY = 4.0
SEQ2SEQ_START = 2
SOURCE_LENGTHS = (5, 60, 33)


@dataclass(frozen=True)
class Family:
    """A saved model, prompts, what transformers continues them with, and how probable it finds
    every token at each of these places: (output tokens, vocab_size).

    sources: what the encoder of an encoder-decoder gets; none for other models. spread: how far
    transformers' own log probabilities of one pass and of a step for each token are apart.
    """

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    sampling: SamplingParams
    sources: Sequence[EncoderInput] = ()
    spread: float = 0.0

    @classmethod
    def of(
        cls,
        model_type: str,
        class_name: str,
        changes: Mapping[str, Any],
        folder: Path,
        lengths: Sequence[int] = PROMPT_LENGTHS,
    ) -> "Family":
        """changes: to the tiny config, of its own fields."""
        config = config_of(model_type, class_name, changes)
        reference = build_reference(config, class_name, folder)
        prompts = [random_prompt(length) for length in lengths]
        outputs = [greedy_output(reference, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
        tokens = [new for new, _ in outputs]
        of_all = [
            reference_logits(reference, prompt + new).log_softmax(-1)
            for prompt, new in zip(prompts, tokens, strict=True)
        ]
        logprobs = [one[-NUM_OUTPUT_TOKENS - 1 : -1] for one in of_all]
        by_steps = [logits.log_softmax(-1) for _, logits in outputs]
        spread = max(_distance(*both) for both in zip(logprobs, by_steps, strict=True))
        sampling = SamplingParams(logit_bias=dict.fromkeys(BANNED_TOKENS, -100.0))
        return cls(folder, prompts, tokens, logprobs, sampling, spread=spread)

    @classmethod
    def of_seq2seq(
        cls, model_type: str, folder: Path, lengths: Sequence[int] = PROMPT_LENGTHS
    ) -> "Family":
        """lengths: of what the decoder is given, its start included."""
        tiny_seq2seq.save(model_type, folder)
        reference = tiny_seq2seq.Reference(model_type, NUM_OUTPUT_TOKENS, REPETITION_PENALTY)
        prompts = [[SEQ2SEQ_START, *random_prompt(length)[1:]] for length in lengths]
        sources = [tiny_seq2seq.random_source(model_type, n, seed=n) for n in SOURCE_LENGTHS]
        truths = [
            reference.truth(source, tuple(prompt))
            for source, prompt in zip(sources, prompts, strict=True)
        ]
        return cls(
            folder,
            prompts,
            [truth.token_ids for truth in truths],
            [truth.logprobs for truth in truths],
            SamplingParams(repetition_penalty=REPETITION_PENALTY),
            sources,
        )

    @property
    def max_logprob_error(self) -> float:
        return max(MAX_LOGPROB_ERROR, MAX_ERROR_OF_SPREAD * self.spread)

    def greedy(self, num_tokens: int) -> SamplingParams:
        """So many tokens, with the log probabilities of the whole vocabulary."""
        fields = {
            name: getattr(self.sampling, name) for name in ("logit_bias", "repetition_penalty")
        }
        vocab_size = self.logprobs[0].shape[1]
        return SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=vocab_size, **fields
        )


def run(
    family: Family, times: int = 1, num_tokens: int = NUM_FIRST_TOKENS, **settings: Any
) -> tuple[list[GenerateResult], EngineStats]:
    """All prompts together, so many times one after the other; results of the last time."""
    engine = _engine_of(family, **settings)
    try:
        for _ in range(times):
            results = engine.generate(family.prompts, family.greedy(num_tokens), family.sources)
        assert {len(one.token_ids) for one in results} == {num_tokens}
        return results, engine.stats()
    finally:
        engine.close()


def _engine_of(family: Family, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(family.folder),
        device="cpu",
        max_context_len=MAX_CONTEXT_LEN,
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **settings,
    )
    return Engine.from_config(config)


def check(family: Family, results: list[GenerateResult]) -> None:
    """Tokens equal, log probabilities near."""
    for tokens, logprobs, result in zip(family.tokens, family.logprobs, results, strict=True):
        num_tokens = len(result.token_ids)
        assert result.token_ids == tokens[:num_tokens]
        assert _distance(_table(result), logprobs[:num_tokens]) < family.max_logprob_error


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _table(result: GenerateResult) -> torch.Tensor:
    """Log probabilities (output tokens, vocab_size) in the order of the vocabulary."""
    assert result.logprobs is not None
    ids = torch.tensor([entry.top_token_ids for entry in result.logprobs])
    values = torch.tensor([entry.top_logprobs for entry in result.logprobs])
    return torch.full_like(values, torch.nan).scatter(1, ids, values)


def check_retracted(family: Family, page_size: int) -> None:
    """Where pages run out: prompts fit together and the longest request fits alone."""
    lengths = [len(prompt) + 1 for prompt in family.prompts]
    longest = max(lengths) + NUM_OUTPUT_TOKENS
    num_pages = max(-(-longest // page_size), sum(-(-length // page_size) for length in lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputForecast, "new_tokens", lambda self, tokens: tokens * 0)
        results, stats = run(
            family, num_tokens=NUM_OUTPUT_TOKENS, page_size=page_size, num_pages=num_pages
        )
    assert stats.num_preemptions > 0
    check(family, results)


def check_cached_prefix(family: Family, page_size: int, border_tokens: int = 1) -> None:
    """Where every prompt has been seen before. border_tokens: prefixes are multiples of it."""
    results, _ = run(family, times=2, page_size=page_size, num_pages=512)
    unit = max(page_size, border_tokens)
    cached = [(len(prompt) - 1) // unit * unit for prompt in family.prompts]
    assert [result.num_cached_tokens for result in results] == cached
    check(family, results)
