"""A tiny model of some family, what transformers says to a few prompts, and the engine beside it.

Greedy tokens and the log probability of each, in whatever way the engine schedules them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fakes.tiny_reference import (
    BANNED_TOKENS,
    build_reference,
    config_of,
    greedy_tokens,
    random_prompt,
    reference_logits,
)
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats
from workers.engine.results import GenerateResult
from workers.sampling.params import SamplingParams

NUM_OUTPUT_TOKENS = 64
# Past windows and chunks, across pages: what differs between ways to run shows within these.
NUM_FIRST_TOKENS = 24
MAX_LOGPROB_ERROR = 1e-4
PROMPT_LENGTHS = (3, 20, 43)
LONGEST = max(PROMPT_LENGTHS) + NUM_OUTPUT_TOKENS


@dataclass(frozen=True)
class Family:
    """A saved model, prompts, what transformers continues them with, and how probable each
    token of that is."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]

    @classmethod
    def of(
        cls, model_type: str, class_name: str, changes: Mapping[str, Any], folder: Path
    ) -> "Family":
        """changes: to the tiny config, of its own fields."""
        config = config_of(model_type, class_name, changes)
        reference = build_reference(config, class_name, folder)
        prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
        tokens = [greedy_tokens(reference, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
        logprobs = []
        for prompt, new in zip(prompts, tokens, strict=True):
            of_all = reference_logits(reference, prompt + new).log_softmax(-1)
            of_new = of_all[len(prompt) - 1 : -1]
            logprobs.append(of_new.gather(1, torch.tensor(new)[:, None])[:, 0])
        return cls(folder, prompts, tokens, logprobs)


def run(
    family: Family, times: int = 1, num_tokens: int = NUM_FIRST_TOKENS, **settings: Any
) -> tuple[list[GenerateResult], EngineStats]:
    """All prompts together, so many times one after the other; results of the last time."""
    config = EngineConfig(
        model=str(family.folder),
        device="cpu",
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **settings,
    )
    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        logit_bias=dict.fromkeys(BANNED_TOKENS, -100.0),
    )
    engine = Engine.from_config(config)
    try:
        for _ in range(times):
            results = engine.generate(family.prompts, greedy)
        assert {len(one.token_ids) for one in results} == {num_tokens}
        return results, engine.stats()
    finally:
        engine.close()


def check(family: Family, results: list[GenerateResult]) -> None:
    """Tokens equal, log probabilities near."""
    for tokens, logprobs, result in zip(family.tokens, family.logprobs, results, strict=True):
        num_tokens = len(result.token_ids)
        assert result.token_ids == tokens[:num_tokens]
        got = torch.tensor([entry.logprob for entry in result.logprobs])
        assert float((got - logprobs[:num_tokens]).abs().max()) < MAX_LOGPROB_ERROR


def check_retracted(family: Family, page_size: int) -> None:
    """Where pages run out."""
    num_pages = LONGEST // page_size + 1 + LONGEST // (4 * page_size)
    results, stats = run(
        family, num_tokens=NUM_OUTPUT_TOKENS, page_size=page_size, num_pages=num_pages
    )
    assert stats.num_preemptions > 0
    check(family, results)


def check_cached_prefix(family: Family, page_size: int) -> None:
    """Where every prompt has been seen before."""
    results, _ = run(family, times=2, page_size=page_size, num_pages=512)
    cached = [(length - 1) // page_size * page_size for length in PROMPT_LENGTHS]
    assert [result.num_cached_tokens for result in results] == cached
    check(family, results)
