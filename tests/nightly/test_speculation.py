"""200 requests with each proposer: the same tokens, log probabilities and ends as without.

Prompts are held-out texts that the built-in model never saw. Half of them are cut to share how they
begin; memory is short, so that requests are retracted, and drafts take pages from each other.
"""

import json
import random
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.fakes.eagle_heads import save_head
from tests.unit.workers.engine.test_speculation import assert_same
from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.sampling.params import SamplingParams

NUM_REQUESTS = 200
GRAMMARS = (
    LLMatcher.grammar_from_regex("(yes|no|perhaps)( and (yes|no|perhaps)){3,9}"),
    LLMatcher.grammar_from_regex("[a-z ]{20,60}"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def held_out_prompts(rng: random.Random) -> list[list[int]]:
    """Each of 8 to 160 tokens; the odd ones begin alike, and every fourth says itself twice."""
    tokenizer = Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))
    documents = collect_corpus(Path(sysconfig.get_path("stdlib")))
    texts = [one.text for one in documents if is_held_out(one.group) and len(one.text) > 1000]
    stem = tokenizer.encode(texts[0][:400], add_special_tokens=False).ids[:40]
    prompts = []
    for index in range(NUM_REQUESTS):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 900)
        ids = tokenizer.encode(text[start : start + 900], add_special_tokens=False).ids
        own = ids[: rng.randrange(8, 120)]
        prompts.append((stem if index % 2 else []) + own + (own if index % 4 == 0 else []))
    return prompts


def sampling_of(rng: random.Random, index: int) -> SamplingParams:
    max_tokens = rng.randrange(1, 80)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        seed=index,
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, rng.choice([0, 0, 6])),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        logprobs=rng.choice([None, 2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {7: 3.0}]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (11, 12)]),
    )


def requests_of() -> list[GenerateRequest]:
    rng = random.Random(14)
    return [
        GenerateRequest(
            f"r{index}",
            prompt,
            sampling_of(rng, index),
            grammar=rng.choice(GRAMMARS) if index % 5 == 0 else "",
            max_draft_tokens=rng.choice([None, None, None, 0, 2]),
        )
        for index, prompt in enumerate(held_out_prompts(rng))
    ]


def run(
    requests: Sequence[GenerateRequest], **settings: Any
) -> tuple[list[GenerateResult], EngineStats]:
    config = EngineConfig(
        device="cpu", num_cpu_threads=1, check_integrity_when_idle=True, page_size=8, **settings
    )
    engine, collector = Engine.from_config(config), ResultCollector()
    try:
        for request in requests:
            engine.submit(request)
            collector.expect(request.request_id)
        while collector.is_waiting or engine.has_work:
            collector.add(engine.step())
        return collector.results(), engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return requests_of()


@pytest.fixture(scope="module")
def plain(requests: list[GenerateRequest]) -> list[GenerateResult]:
    return run(requests)[0]


@pytest.fixture(scope="module")
def head(plain: list[GenerateResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With random weights, of the tokens that are said most: some drafts are right."""
    said = Counter(token for result in plain for token in result.token_ids)
    config = json.loads((builtin_model_path() / "config.json").read_text())
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
    draft_ids = sorted(token for token, _ in said.most_common(8))
    return save_head(tmp_path_factory.mktemp("head"), config, draft_ids, **taps)


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("ngram", ()),
        ("suffix", ()),
        ("draft:builtin-draft", ()),
        ("eagle3:HEAD", ()),
        ("eagle3:builtin-head", ()),
        ("suffix", (4, 4, 2, 2)),
        ("draft:builtin-draft", (4, 4, 2, 2)),
        ("eagle3:builtin-head", (4, 4, 2, 2)),
    ],
)
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_200_requests_are_answered_alike(
    requests: list[GenerateRequest],
    plain: list[GenerateResult],
    head: Path,
    method: str,
    tree: tuple[int, ...],
    policy: str,
) -> None:
    results, stats = run(
        requests,
        speculative=method.replace("HEAD", str(head)),
        draft_policy=policy,
        max_draft_tokens=6,
        draft_tree=tree,
        # Few enough for requests of a policy that soon drafts no more, too.
        num_pages=160,
    )
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0
    assert stats.num_cached_prompt_tokens > 0
