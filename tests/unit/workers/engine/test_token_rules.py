"""Rules for tokens hold through the whole engine, whatever shares the batch and whatever comes
between: retraction, chunks, overlap, drafts, another engine."""

import random
from typing import Any

import pytest

from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.engine.results import GenerateResult
from workers.sampling.params import SamplingParams

NUM_REQUESTS = 8
ALLOWED = tuple(range(40, 60))


def samplings() -> list[SamplingParams]:
    """Of few tokens, so that what is bad would be said often."""
    rng = random.Random(3)
    made = []
    for index in range(NUM_REQUESTS):
        words = tuple(tuple(rng.choices(ALLOWED[:10], k=rng.randrange(1, 4))) for _ in range(12))
        made.append(
            SamplingParams(
                seed=index,
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=28,
                allowed_token_ids=ALLOWED,
                bad_words=words if index % 3 else (),
                logprobs=0,
                logprob_token_ids=(41, 300) if index % 2 else (),
                frequency_penalty=0.5,
            )
        )
    return made


def generate(**settings: Any) -> list[GenerateResult]:
    config = EngineConfig(
        device="cpu", num_cpu_threads=1, check_integrity_when_idle=True, **settings
    )
    engine = Engine.from_config(config)
    rng = random.Random(4)
    prompts = [[rng.randrange(5, 200) for _ in range(8)] for _ in range(NUM_REQUESTS)]
    try:
        return engine.generate(prompts, samplings())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def results() -> list[GenerateResult]:
    return generate(page_size=16)


def has(token_ids: list[int], word: tuple[int, ...]) -> bool:
    return any(
        tuple(token_ids[i : i + len(word)]) == word for i in range(len(token_ids) - len(word) + 1)
    )


def test_no_output_has_what_it_may_not_have(results: list[GenerateResult]) -> None:
    for result, sampling in zip(results, samplings(), strict=True):
        assert set(result.token_ids) <= set(ALLOWED)
        assert not [word for word in sampling.bad_words if has(result.token_ids, word)]
    # Without the rule some would have had them.
    every_word = {word for sampling in samplings() for word in sampling.bad_words if len(word) > 1}
    free = [r for r, s in zip(results, samplings(), strict=True) if not s.bad_words]
    assert any(has(result.token_ids, word) for result in free for word in every_word)


def test_named_tokens_have_their_log_probabilities(results: list[GenerateResult]) -> None:
    for result, sampling in zip(results, samplings(), strict=True):
        assert result.logprobs is not None
        named = {tuple(entry.top_token_ids) for entry in result.logprobs}
        assert named == {sampling.logprob_token_ids}


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "num_pages": 70},
        {"page_size": 4, "max_step_tokens": 24, "enable_overlap": False},
        pytest.param({"page_size": 16, "max_running_requests": 3}, marks=pytest.mark.nightly),
        {"page_size": 16, "speculative": "ngram"},
    ],
    ids=["retracted", "chunked", "by_turns", "drafts"],
)
def test_the_company_changes_nothing(
    results: list[GenerateResult], settings: dict[str, Any]
) -> None:
    found = generate(**settings)
    assert [r.token_ids for r in found] == [r.token_ids for r in results]


def test_a_request_that_another_engine_began_goes_on_by_its_rules(
    results: list[GenerateResult],
) -> None:
    config = EngineConfig(device="cpu", num_cpu_threads=1, page_size=16)
    engine = Engine.from_config(config)
    rng = random.Random(4)
    prompts = [[rng.randrange(5, 200) for _ in range(8)] for _ in range(NUM_REQUESTS)]
    try:
        index = 1
        engine.submit(
            GenerateRequest(
                "again",
                prompts[index],
                samplings()[index],
                resumed_token_ids=results[index].token_ids[:11],
            )
        )
        rest: list[int] = []
        while engine.has_work:
            rest += [token for output in engine.step() for token in output.token_ids]
    finally:
        engine.close()
    assert rest == results[index].token_ids[11:]
