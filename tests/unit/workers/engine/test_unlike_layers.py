"""Models whose layers differ in heads, share K and V, see chunks or attend twice: the engine
against transformers, alone, in company, in chunks, after retraction and with a cached prefix."""

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
    return Family.of(request.param, class_name, changes, folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1},
        {"page_size": 1, "max_step_tokens": 16},
        {"page_size": 16, "num_tokens": NUM_OUTPUT_TOKENS},
        pytest.param(
            {"page_size": 64, "max_step_tokens": 16, "enable_overlap": False},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["alone", "page_1_chunked", "page_16", "page_64_chunked"],
)
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
