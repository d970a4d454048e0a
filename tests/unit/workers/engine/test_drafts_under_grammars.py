"""Rows with a grammar have drafts: texts, ends and log probabilities are those without."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.fakes.drafted_runner import ReplayingRunner
from tests.unit.workers.engine.test_grammars import PERSON, TOKENIZER, request_of, run, text_of
from tests.unit.workers.engine.test_speculation import assert_same
from workers import Engine
from workers.config import EngineConfig
from workers.constraints.mask_deadline import NEVER, MaskDeadline
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.engine.results import GenerateResult

CHAIN = LLMatcher.grammar_from_regex("((yes|no) and ){9}(perhaps|never)")
SO = TOKENIZER.encode(" and")[-1]


def requests() -> list[GenerateRequest]:
    """What repeats itself and must end elsewhere; what is drawn; rules that look back, too."""
    return [
        request_of(0, CHAIN, temperature=0.0, max_tokens=80),
        request_of(1, CHAIN, max_tokens=80),
        request_of(2, PERSON, max_tokens=80),
        request_of(3, "", temperature=0.0, max_tokens=60, ignore_eos=True),
        request_of(4, CHAIN, temperature=0.0, max_tokens=80, frequency_penalty=1.5),
        request_of(5, CHAIN, temperature=0.0, max_tokens=15),
        request_of(6, CHAIN, max_tokens=80, bad_words=((SO, SO),), logit_bias={SO: 2.0}),
    ]


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(device="cpu", num_cpu_threads=1, check_integrity_when_idle=True, **settings)


def results_under_grammars(engine: Engine, deadline: MaskDeadline = NEVER) -> list[GenerateResult]:
    engine._patience.deadline = lambda plan: deadline  # type: ignore[method-assign]
    return run(engine, *requests())


def check_grammars(results: list[GenerateResult]) -> None:
    texts = [text_of(result) for result in results]
    assert all(re.fullmatch("((yes|no) and ){9}(perhaps|never)", texts[i]) for i in (0, 1, 4, 6))
    assert set(json.loads(texts[2])) == {"name", "age", "tags"}
    assert [one.finish_reason for one in results].count(FinishReason.STOP) == 5


@pytest.fixture(scope="module")
def plain() -> list[GenerateResult]:
    engine = Engine.from_config(config())
    try:
        return results_under_grammars(engine)
    finally:
        engine.close()


def on_the_rank(own: EngineConfig) -> Engine:
    return Engine.from_config(own)


def on_the_host(own: EngineConfig) -> Engine:
    return ReplayingRunner(own).engine()


@pytest.mark.parametrize(
    ("start", "settings"),
    [
        (on_the_rank, {"page_size": 4, "max_step_tokens": 32}),
        (on_the_rank, {"enable_overlap": False, "speculative": "suffix"}),
        (on_the_host, {"max_draft_tokens": 7}),
    ],
    ids=["small_pages", "step_by_step", "on_the_host"],
)
def test_texts_are_the_same_and_their_drafts_hold(
    plain: list[GenerateResult],
    start: Callable[[EngineConfig], Engine],
    settings: dict[str, Any],
) -> None:
    engine = start(config(**{"speculative": "ngram", "draft_policy": "fixed", **settings}))
    of_grammars = CountedDrafts(engine)
    try:
        results = results_under_grammars(engine)
    finally:
        engine.close()
    assert_same(results, plain)
    assert of_grammars.num_allowed > 20
    # Some the grammar refuses, and what stands behind them is cut.
    assert of_grammars.num_drafts > of_grammars.num_allowed
    check_grammars(results)


class CountedDrafts:
    """Of rows with a grammar: drafts that were verified, those that had masks, and runs by
    request."""

    def __init__(self, engine: Engine) -> None:
        self.num_drafts = self.num_allowed = 0
        self.num_runs = Counter[str]()
        self._finish = engine._filler.finish
        engine._filler.finish = self  # type: ignore[method-assign, assignment]

    def __call__(self, begun: Any) -> Any:
        filled = self._finish(begun)
        self.num_runs.update(row.request.request_id for row in filled.rows if row.drafts)
        self.num_drafts += sum(len(row.drafts) for row in filled.rows)
        self.num_allowed += len(filled.masks.slots) - len(filled.rows)
        return filled


def test_drafts_whose_masks_keep_steps_waiting_become_fewer(plain: list[GenerateResult]) -> None:
    own = config(speculative="ngram", draft_policy="fixed", max_draft_tokens=4)
    engine = Engine.from_config(own)
    counted = CountedDrafts(engine)
    try:
        results = results_under_grammars(engine, MaskDeadline(0.0))
    finally:
        engine.close()
    assert_same(results, plain)
    # Four at first, then two, one and none, found or not.
    assert 0 < max(counted.num_runs.values()) <= 3
