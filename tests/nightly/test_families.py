"""Every family of memory, in float32: transformers' greedy tokens and log probabilities of the
whole vocabulary, alone, in company, in chunks, after retraction and with a cached prefix, over
pages of 1, 16 and 64 tokens.
"""

import pytest

from tests.fakes.families import FAMILIES, EncoderDecoder, FamilyModel
from tests.fakes.reference_family import (
    MAX_LOGPROB_ERROR,
    NUM_OUTPUT_TOKENS,
    Family,
    check,
    check_cached_prefix,
    check_retracted,
    run,
)

of_page_sizes = pytest.mark.parametrize("page_size", [1, 16, 64])
# What transformers' own two ways to compute the delta rule may be apart.
MAX_SPREAD = 5e-3


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> FamilyModel | EncoderDecoder:
    return FAMILIES[name]


@pytest.fixture(scope="module")
def family(
    name: str, model: FamilyModel | EncoderDecoder, tmp_path_factory: pytest.TempPathFactory
) -> Family:
    return model.build(tmp_path_factory.mktemp(name))


def test_only_the_delta_rule_needs_a_wider_bound(family, model) -> None:
    if model.has_delta_rule:
        assert MAX_LOGPROB_ERROR < family.spread < MAX_SPREAD
    else:
        assert family.max_logprob_error == MAX_LOGPROB_ERROR


@of_page_sizes
@pytest.mark.parametrize(
    "settings",
    [{"max_running_requests": 1}, {}, {"max_step_tokens": 16}],
    ids=["alone", "batched", "chunked"],
)
def test_texts_are_those_of_transformers(family, page_size, settings) -> None:
    results, _ = run(
        family, num_tokens=NUM_OUTPUT_TOKENS, page_size=page_size, num_pages=512, **settings
    )
    check(family, results)


@of_page_sizes
def test_retraction_changes_nothing(family, page_size) -> None:
    check_retracted(family, page_size)


@of_page_sizes
def test_a_cached_prefix_changes_nothing(family, model, page_size) -> None:
    check_cached_prefix(family, page_size, model.border_tokens)
