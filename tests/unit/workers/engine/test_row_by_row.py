"""Models that keep their own attention: the engine against transformers, alone, in company, in
chunks, after retraction and with a cached prefix. They run row by row over the same pages."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.fakes.reference_family import (
    NUM_OUTPUT_TOKENS,
    Family,
    check,
    check_cached_prefix,
    check_retracted,
    run,
)
from tests.proofs.served import serves
from workers.models.features import ROW_BY_ROW, ModelFeature

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # ALiBi, from the attention mask.
    "bloom": ("BloomForCausalLM", {"seq_length": 256}),
    # Positions from the length of the cache, in a decoder of an encoder-decoder.
    "bart": ("BartForCausalLM", {}),
    # One head of K and V for all, rotated; and with ALiBi, heads of their own.
    "falcon": ("FalconForCausalLM", {}),
    "falcon_alibi": ("FalconForCausalLM", {"alibi": True, "new_decoder_architecture": True}),
    "gptj": ("GPTJForCausalLM", {}),
    # Windows in every other layer.
    "gpt_neo": ("GPTNeoForCausalLM", {}),
    # Attends to 16 tokens that an indexer picks; its keys are kept beside the latents.
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
}

# What it shows is shown for the others every night.
FAST = {"bart"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in FAST else pytest.mark.nightly) for name in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    class_name, changes = FAMILIES[request.param]
    model_type = request.param.removesuffix("_alibi")
    return Family.of(model_type, class_name, changes, tmp_path_factory.mktemp(request.param))


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
@serves(ROW_BY_ROW.subject, ModelFeature.CPU)
def test_tokens_and_log_probabilities_are_those_of_transformers(
    family: Family, settings: Mapping[str, Any]
) -> None:
    results, _ = run(family, num_pages=512, **settings)
    check(family, results)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.nightly)])
def test_retraction_changes_nothing(family: Family, page_size: int) -> None:
    check_retracted(family, page_size)


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_cached_prefix_changes_nothing(family: Family, page_size: int) -> None:
    check_cached_prefix(family, page_size)


@serves(ROW_BY_ROW.subject, ModelFeature.SPECULATION)
def test_drafts_change_nothing(family: Family) -> None:
    results, _ = run(family, num_pages=512, speculative="ngram")
    check(family, results)
