"""Whatever is submitted, aborted and stepped, every request gets what it gets alone."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from attention.memory.layout import CurrentChunk, LastTokens
from tests.fakes.logprobs import prompt_entries
from tests.unit.workers.scheduler.driver import Driver, make_config
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import GenerateRequest
from workers.errors import ErrorCode, RequestRejectedError
from workers.sampling.params import SamplingParams
from workers.scheduler import prefills_under_way, snapshot_memory, step_budget, step_filling
from workers.scheduler.config import BoundedAccount, SchedulerConfig

VOCAB_SIZE = 40


@pytest.fixture(autouse=True)
def prompts_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a target binds, and requests wait for prefixes, at the length of these prompts."""
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "PROMPT_ROLL_TOKENS", 8)
    monkeypatch.setattr(step_budget, "MIN_PROMPT_TOKENS", 2)
    monkeypatch.setattr(step_budget, "UNMEASURED_PROMPT_TOKENS", 5)
    monkeypatch.setattr(step_filling, "TILE_TOKENS", 4)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_size = draw(st.sampled_from([1, 4, 16]))
    bounded = draw(st.one_of(st.just(()), accounts(page_size)))
    num_snapshots = draw(st.sampled_from([0, 0, 1, 2, 5, 20]))
    return make_config(
        page_size=page_size,
        num_pages=1 + -(-draw(st.sampled_from([48, 64, 80, 128, 400])) // page_size),
        max_running_requests=draw(st.sampled_from([8, 8, 8, 4, 3, 1])),
        max_context_len=draw(st.sampled_from([64, 64, 32])),
        max_step_tokens=draw(st.sampled_from([64, 32, 16, 16, 9, 5, 2, 1])),
        max_waiting_requests=20,
        enable_prefix_cache=draw(st.booleans()),
        enable_mixed_batches=draw(st.booleans()),
        target_inter_token_s=draw(st.sampled_from([None, 1e-4, 6e-3, 12e-3])),
        vocab_size=VOCAB_SIZE,
        bounded=bounded,
        max_draft_tokens=0 if bounded or num_snapshots else draw(st.sampled_from([0, 1, 3, 6])),
        num_snapshots=num_snapshots,
    )


@st.composite
def accounts(draw: st.DrawFn, page_size: int) -> tuple[BoundedAccount, ...]:
    """Windows and chunks, from memory that is just enough to memory for everything."""
    kinds = draw(st.lists(st.sampled_from([LastTokens, CurrentChunk]), min_size=1, max_size=2))
    bounded = []
    for kind in kinds:
        retention = kind(draw(st.sampled_from([1, 3, 4, 8, 16, 24])))
        least = BoundedAccount(retention, 1).min_pages(page_size)
        num_more = draw(st.sampled_from([0, 0, 1, 40, 400])) // page_size
        bounded.append(BoundedAccount(retention, least + num_more))
    return tuple(bounded)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Few distinct beginnings, so that prefixes are shared, in part and in whole."""
    stem = draw(st.sampled_from([0, 3, 5]))
    shared = [(stem + i * i) % VOCAB_SIZE for i in range(draw(st.integers(0, 28)))]
    return shared + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 32), st.integers(16, 32)))
    return SamplingParams(
        seed=draw(st.integers(-3, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 6, 6))),
        stop_token_ids=draw(st.sampled_from([(), (), (5,), (0, 7)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, None, None, 1])),
    )


specs = st.builds(
    dict,
    prompt_token_ids=prompts(),
    sampling=samplings(),
    priority=st.sampled_from([0, 0, 1, -1]),
    cache_salt=st.sampled_from(["", "", "tenant"]),
)


def is_accepted(driver: Driver, request: GenerateRequest) -> bool:
    """Only for its length or for a full queue may a request of these be refused."""
    try:
        driver.submit(request)
    except RequestRejectedError as error:
        if error.code not in (ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.QUEUE_FULL):
            raise
        return False
    return True


def num_wanted(config: SchedulerConfig, request: GenerateRequest) -> int:
    """Tokens of output that the configuration has room for."""
    return config.max_request_len - len(request.prompt_token_ids)


def begun_elsewhere(driver: Driver, whole: GenerateRequest, num_done: int) -> GenerateRequest:
    """The request as another engine had it when it was lost, with a token to come."""
    tokens = run_alone(driver.config, whole).token_ids
    return msgspec.structs.replace(
        whole, resumed_token_ids=tokens[: min(num_done, len(tokens) - 1)]
    )


def check_result(driver: Driver, request: GenerateRequest) -> None:
    expected = run_alone(driver.config, request)
    outputs = driver.outputs[request.request_id]
    resumed = request.resumed_token_ids
    tokens = resumed + driver.tokens(request.request_id)
    assert sum(output.finish_reason is not None for output in outputs) == 1
    if driver.is_failed(request.request_id):
        assert outputs[-1].error.code is ErrorCode.OUT_OF_MEMORY
    if driver.is_aborted(request.request_id) or driver.is_failed(request.request_id):
        assert tokens == expected.token_ids[: len(tokens)]
        assert len(tokens) < len(expected.token_ids)
        return
    last = outputs[-1]
    assert tokens == expected.token_ids
    assert (last.finish_reason, last.stop_token_id) == (
        expected.finish_reason,
        expected.stop_token_id,
    )
    if request.sampling.logprobs is None:
        assert all(output.logprobs is None for output in outputs)
    else:
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        assert entries == expected.logprobs[len(resumed) :]
    wants_prompt = request.sampling.prompt_logprobs is not None and not resumed
    assert prompt_entries(outputs[0]) == (expected.prompt_logprobs if wants_prompt else None)
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def check_idle(driver: Driver) -> None:
    driver.scheduler.check_integrity()
    stats = driver.scheduler.stats()
    assert not driver.scheduler.has_work
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert (stats.queued_tokens, stats.running_tokens) == (0, 0)


class AnyTraffic(RuleBasedStateMachine):
    """Submits, aborts, half steps, rows without memory and requests of lost engines, in any
    order; at the end everything is drained.
    """

    @initialize(config=configs(), is_overlapped=st.booleans(), has_reserve=st.booleans())
    def start(self, config: SchedulerConfig, is_overlapped: bool, has_reserve: bool) -> None:
        self.driver = Driver(config, is_overlapped, has_reserve)
        self.requests: list[GenerateRequest] = []

    @rule(burst=st.lists(specs, min_size=2, max_size=8))
    def submit(self, burst: list[dict[str, Any]]) -> None:
        for spec in burst:
            request = GenerateRequest(request_id=f"r{len(self.requests)}", **spec)
            if is_accepted(self.driver, request):
                self.requests.append(request)

    @rule(spec=specs, num_done=st.integers(1, 32))
    def take_over(self, spec: dict[str, Any], num_done: int) -> None:
        whole = GenerateRequest(request_id=f"r{len(self.requests)}", **spec)
        if num_wanted(self.driver.config, whole) > 0:
            request = begun_elsewhere(self.driver, whole, num_done)
            if is_accepted(self.driver, request):
                self.requests.append(request)

    @rule(row=st.integers(0, 7))
    def fail(self, row: int) -> None:
        self.driver.fail_row(row)
        self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.requests)).request_id
        was_finished = self.driver.is_finished(request_id)
        was_aborted = self.driver.scheduler.abort(request_id)
        assert not (was_finished and was_aborted)
        assert not self.driver.scheduler.abort(request_id)
        self.driver.scheduler.check_integrity()

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.driver.has_launched)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()
            for request in self.requests:
                check_result(self.driver, request)
            check_idle(self.driver)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(configs(), st.booleans(), st.booleans(), st.lists(specs, min_size=4, max_size=16))
def test_requests_submitted_together_get_what_each_gets_alone(
    config: SchedulerConfig,
    is_overlapped: bool,
    has_reserve: bool,
    all_specs: list[dict[str, Any]],
) -> None:
    driver = Driver(config, is_overlapped, has_reserve)
    accepted = []
    for index, spec in enumerate(all_specs):
        request = GenerateRequest(request_id=f"r{index}", **spec)
        if is_accepted(driver, request):
            accepted.append(request)
    driver.finish()
    for request in accepted:
        check_result(driver, request)
    check_idle(driver)
