"""Masks that come late hold up their own rows: others go on, and texts are what they were."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.unit.workers.engine.test_forced_tokens import FORM, told
from tests.unit.workers.engine.test_grammars import (
    TOKENIZER,
    request_of,
    run,
    run_together,
    wait_until_compiled,
)
from workers import Engine
from workers.config import EngineConfig
from workers.constraints.mask_deadline import NEVER, MaskDeadline
from workers.constraints.masks import AskedMasks, MaskRow
from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.engine.results import GenerateResult, ResultCollector
from workers.scheduler.plan import StepPlan

COMMON = {"max_tokens": 24, "logprobs": None}
LETTERS = LLMatcher.grammar_from_regex("[abc]{18}")
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")


def plain(index: int, **changes: Any) -> GenerateRequest:
    return request_of(
        index, "", **{"logprobs": None, "max_tokens": 60, "ignore_eos": True, **changes}
    )


def requests() -> list[GenerateRequest]:
    """Plain ones with more tokens than the others take steps. What the third and the last may say
    depends on what they have said."""
    return [
        request_of(0, FORM, **COMMON),
        plain(1),
        request_of(2, FORM, **COMMON, temperature=0.0),
        request_of(3, FORM, **COMMON, presence_penalty=0.8, frequency_penalty=0.3),
        plain(4, temperature=0.0),
        request_of(5, LETTERS, **COMMON, allowed_token_ids=(A, B, C), bad_words=((A, A), (B, B))),
    ]


def step_until(is_done: Callable[[], bool], step: Callable[[], object]) -> None:
    """Fails where it takes longer than any machine should."""
    give_up_s = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < give_up_s
        step()


def start(**settings: Any) -> Engine:
    return Engine.from_config(
        EngineConfig(num_cpu_threads=1, check_integrity_when_idle=True, **settings)
    )


@pytest.fixture(scope="module")
def patient() -> list[GenerateResult]:
    """What comes where no mask is late."""
    engine = start()
    engine._patience.deadline = lambda plan: NEVER  # type: ignore[method-assign]
    try:
        return run_together(engine, *requests())
    finally:
        engine.close()


class Delayed:
    """Of the masks that are asked for, every nth batch takes delay_s longer."""

    def __init__(self, engine: Engine, delay_s: float, nth: int) -> None:
        self._fill = engine._grammars.fill
        self._delay_s = delay_s
        self._nth = nth
        self._count = 0
        self._lock = threading.Lock()
        engine._filler._fill = self

    def __call__(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        with self._lock:
            self._count += 1
            is_late = self._count % self._nth == 0
        if is_late:
            time.sleep(self._delay_s)
        self._fill(rows, bits)


class CountedAgain:
    """Counts the rows of an engine that run again, by request."""

    def __init__(self, engine: Engine) -> None:
        self.request_ids = Counter[str]()
        self._run_again = engine._scheduler.run_again
        engine._scheduler.run_again = self  # type: ignore[method-assign, assignment]

    def __call__(self, plan: StepPlan, rows: Sequence[MaskRow]) -> None:
        self.request_ids.update(row.request.request_id for row in rows)  # type: ignore[attr-defined]
        self._run_again(plan, rows)


def at_once(plan: StepPlan) -> MaskDeadline:
    return MaskDeadline(time.perf_counter())


def make_late(engine: Engine, nth: int = 2) -> CountedAgain:
    """Of the masks of an engine, which then waits for none."""
    engine._patience.deadline = at_once  # type: ignore[method-assign]
    Delayed(engine, 0.003, nth)
    return CountedAgain(engine)


@pytest.mark.parametrize(
    ("settings", "nth"),
    [
        ({}, 1),
        pytest.param({}, 3, marks=pytest.mark.nightly),
        ({"page_size": 4, "max_step_tokens": 24}, 2),
        ({"page_size": 4, "num_pages": 40}, 2),
        ({"enable_overlap": False}, 2),
        ({"speculative": "suffix", "draft_policy": "fixed"}, 2),
    ],
    ids=["every_mask", "some", "small_pages", "few_pages", "step_by_step", "drafts_not_found"],
)
def test_texts_are_those_of_masks_in_time(
    patient: list[GenerateResult], settings: dict[str, Any], nth: int
) -> None:
    engine = start(**settings)
    again = make_late(engine, nth)
    try:
        results = run_together(engine, *requests())
        num_tokens = engine.stats().num_output_tokens
    finally:
        engine.close()
    assert told(results) == told(patient)
    assert again.request_ids
    if nth == 1:
        assert set(again.request_ids) == {"r0", "r2", "r3", "r5"}
    assert num_tokens == sum(len(one.token_ids) for one in results)


class Stuck:
    """Masks of an engine, those of the requests that are asked for first, come when release is
    set."""

    def __init__(self, engine: Engine) -> None:
        self.asked, self.release = threading.Event(), threading.Event()
        self._stuck: list[TokenMatcher] = []
        # What is under way may not have begun.
        wait([batch.future for batch, _ in engine._filler._under_way.values()])
        self._fill = engine._filler._fill
        engine._filler._fill = self

    def __call__(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        # Rows that cannot run again are made by who drives the engine.
        if threading.current_thread() is not threading.main_thread():
            self._stuck = self._stuck or [asked.matcher for asked in rows]
            self.asked.set()
            if any(asked.matcher in self._stuck for asked in rows):
                assert self.release.wait(60)
        self._fill(rows, bits)


def test_a_row_without_a_grammar_goes_on_while_another_waits_for_its_mask() -> None:
    engine = start()
    engine._patience.deadline = at_once  # type: ignore[method-assign]
    collector = ResultCollector()
    told_of: Counter[str] = Counter()

    def step() -> None:
        outputs = engine.step()
        collector.add(outputs)
        told_of.update(one.request_id for one in outputs)

    try:
        for request in (request_of(0, FORM, **COMMON), plain(1, max_tokens=1000)):
            engine.submit(request)
            collector.expect(request.request_id)
        wait_until_compiled(engine)
        step_until(lambda: told_of.keys() == {"r0", "r1"}, step)
        stuck = Stuck(engine)
        step_until(stuck.asked.is_set, step)
        before = told_of.copy()
        for _ in range(30):
            step()
        # What was sampled when its mask got stuck still comes.
        assert told_of["r0"] <= before["r0"] + 1
        assert told_of["r1"] == before["r1"] + 30
        stuck.release.set()
        engine.abort("r1")
        step_until(lambda: not collector.is_waiting, step)
    finally:
        stuck.release.set()
        engine.close()
    assert told_of["r0"] > before["r0"] + 1


def test_a_row_with_a_grammar_goes_on_while_another_waits_for_its_mask() -> None:
    """One that came later, whose masks are nobody's yet, is not behind the other's either."""
    engine = start()
    engine._patience.deadline = at_once  # type: ignore[method-assign]
    collector = ResultCollector()
    ended: list[str] = []

    def step() -> list[StepOutput]:
        outputs = engine.step()
        collector.add(outputs)
        ended.extend(one.request_id for one in outputs if one.finish_reason)
        return outputs

    def submit(request: GenerateRequest) -> None:
        engine.submit(request)
        collector.expect(request.request_id)
        wait_until_compiled(engine)

    submit(request_of(0, FORM, **COMMON))
    # A row that has nobody beside it is waited for.
    submit(plain(2, max_tokens=1000))
    told_of: set[str] = set()
    step_until(
        lambda: told_of == {"r0", "r2"},
        lambda: told_of.update(one.request_id for one in step()),
    )
    stuck = Stuck(engine)
    try:
        step_until(stuck.asked.is_set, step)
        submit(request_of(1, LETTERS, **COMMON))
        step_until(lambda: "r1" in ended, step)
        stuck.release.set()
        engine.abort("r2")
        step_until(lambda: not collector.is_waiting, step)
    finally:
        stuck.release.set()
        engine.close()
    assert ended.index("r1") < ended.index("r0")


def test_what_was_sampled_is_told_before_the_next_masks_are_waited_for() -> None:
    engine = start()
    engine._patience.deadline = lambda plan: NEVER  # type: ignore[method-assign]
    told_of: Counter[str] = Counter()
    try:
        for request in (request_of(0, FORM, **COMMON), plain(1)):
            engine.submit(request)
        wait_until_compiled(engine)
        step_until(
            lambda: told_of.keys() == {"r0", "r1"},
            lambda: told_of.update(one.request_id for one in engine.step()),
        )
        stuck = Stuck(engine)
        outputs = engine.step()

        def step() -> None:
            nonlocal outputs
            outputs = engine.step()

        step_until(lambda: bool(engine._filler._under_way), step)
        # Its masks are asked for and stuck, and the call has ended.
        assert not stuck.release.is_set()
        assert "r1" in {one.request_id for one in outputs}
        stuck.release.set()
    finally:
        stuck.release.set()
        engine.close()


def test_a_request_that_is_aborted_while_its_mask_is_made_is_not_waited_for() -> None:
    """Another one has its slot in the next step."""
    engine = start(max_running_requests=2)
    engine._patience.deadline = lambda plan: NEVER  # type: ignore[method-assign]
    try:
        (expected,) = run(engine, request_of(2, FORM, **COMMON))
        (beside,) = run(engine, plain(1))
        collector = ResultCollector()
        requests = [request_of(0, FORM, **COMMON), plain(1), request_of(2, FORM, **COMMON)]
        for request in requests:
            engine.submit(request)
            collector.expect(request.request_id)
        wait_until_compiled(engine)
        # Both have begun, so that the first one's next row may run again.
        seen: set[str] = set()

        def step() -> None:
            outputs = engine.step()
            seen.update(one.request_id for one in outputs)
            collector.add(outputs)

        step_until(lambda: {"r0", "r1"} <= seen, step)
        stuck = Stuck(engine)
        step()
        step_until(lambda: bool(engine._filler._under_way), step)
        assert stuck.asked.wait(60)
        engine.abort("r0")
        outputs = engine.step()
        assert {one.request_id for one in outputs} == {"r0", "r1"}
        collector.add(outputs)
        engine.check_integrity()
        stuck.release.set()
        step_until(lambda: not (collector.is_waiting or engine.has_work), step)
        aborted, others = collector.results()[0], collector.results()[1:]
        assert aborted.finish_reason is FinishReason.ABORT
        assert told(others) == told([beside, expected])
    finally:
        stuck.release.set()
        engine.close()
