"""Models whose layers differ in heads, share K and V, see chunks or attend twice: the engine
against transformers, alone, in company, in chunks, after retraction and with a cached prefix."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
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

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # Two of four layers read the K and V of the other two.
    "gemma3n_text": ("Gemma3nForCausalLM", {}),
    # So too, and layers that see everything have wider heads than those with windows.
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    # More KV heads in windowed layers than in the others, and V narrower than K.
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {"v_head_dim": 8}),
    # Chunks of 9 positions, and a temperature that changes every 8.
    "llama4_text": ("Llama4ForCausalLM", {}),
    # Attends twice in a layer, over one K and two halves of V.
    "diffllama": ("DiffLlamaForCausalLM", {}),
    # Runs its layers several times, each time with K and V of its own.
    "hrm_text": ("HrmTextForCausalLM", {}),
}


@dataclass(frozen=True)
class Family:
    """A saved model, prompts, what transformers continues them with, and how probable each
    token of that is."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]


# What the others show is shown for these every night.
SLOW = {"gemma4_text", "mimo_v2_flash", "diffllama", "hrm_text"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    class_name, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = build_reference(config_of(request.param, class_name, changes), class_name, folder)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    tokens = [greedy_tokens(reference, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    logprobs = []
    for prompt, new in zip(prompts, tokens, strict=True):
        of_all = reference_logits(reference, prompt + new).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs.append(of_all.gather(1, torch.tensor(new)[:, None])[:, 0])
    return Family(folder, prompts, tokens, logprobs)


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
    for tokens, logprobs, result in zip(family.tokens, family.logprobs, results, strict=True):
        num_tokens = len(result.token_ids)
        assert result.token_ids == tokens[:num_tokens]
        got = torch.tensor([entry.logprob for entry in result.logprobs])
        assert float((got - logprobs[:num_tokens]).abs().max()) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1},
        {"page_size": 1, "max_step_tokens": 16},
        {"page_size": 16, "num_tokens": NUM_OUTPUT_TOKENS},
        {"page_size": 64, "max_step_tokens": 16, "enable_overlap": False},
    ],
    ids=["alone", "page_1_chunked", "page_16", "page_64_chunked"],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(
    family: Family, settings: Mapping[str, Any]
) -> None:
    results, _ = run(family, num_pages=512, **settings)
    check(family, results)


@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_changes_nothing(family: Family, page_size: int) -> None:
    longest = max(PROMPT_LENGTHS) + NUM_OUTPUT_TOKENS
    num_pages = longest // page_size + 1 + longest // (4 * page_size)
    results, stats = run(
        family, num_tokens=NUM_OUTPUT_TOKENS, page_size=page_size, num_pages=num_pages
    )
    assert stats.num_preemptions > 0
    check(family, results)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cached_prefix_changes_nothing(family: Family, page_size: int) -> None:
    results, _ = run(family, times=2, page_size=page_size, num_pages=512)
    cached = [(length - 1) // page_size * page_size for length in PROMPT_LENGTHS]
    assert [result.num_cached_tokens for result in results] == cached
    check(family, results)
