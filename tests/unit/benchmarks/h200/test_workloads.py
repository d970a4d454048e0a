"""The workloads: what an engine is asked for, and what comes of the time it takes."""

import pytest

from benchmarks.h200.driver import MAX_RUNNING_REQUESTS
from benchmarks.h200.workloads import (
    WORKLOADS,
    Batch,
    Chat,
    Decode,
    FirstToken,
    FullLoad,
    Prefill,
    SharedPrefix,
    WorkloadRunner,
)


class RecordingEngine:
    """Answers at once with as many tokens as asked, and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        self.calls.append((prompts, max_tokens))
        return max_tokens


def test_a_shared_prefix_is_the_same_cold_and_warm_and_everything_behind_it_is_new() -> None:
    engine = RecordingEngine()
    runner = WorkloadRunner(engine.generate, 50_000)
    rows = dict(runner.rows(SharedPrefix(3, 40, 20, 7)))
    assert list(rows) == ["prefix_3x40_cold_s", "prefix_3x40_warm_s"]
    (cold, cold_tokens), (warm, warm_tokens) = engine.calls
    assert cold_tokens == warm_tokens == [7, 7, 7]
    prompts = [*cold, *warm]
    assert {len(prompt) for prompt in prompts} == {60}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6


def test_the_next_round_of_a_shared_prefix_has_another_one() -> None:
    engine = RecordingEngine()
    runner = WorkloadRunner(engine.generate, 50_000)
    for _ in range(2):
        list(runner.rows(SharedPrefix(1, 40, 20, 7)))
    assert engine.calls[0][0][0][:40] != engine.calls[2][0][0][:40]


def test_decode_time_is_the_difference_of_many_tokens_and_one() -> None:
    engine = RecordingEngine()
    rows = dict(WorkloadRunner(engine.generate, 50_000).rows(Decode(2, 16)))
    assert list(rows) == ["decode_2_ms", "prefill_2x16_tps"]
    assert [max_tokens for _, max_tokens in engine.calls] == [[1, 1], [257, 257]]
    assert engine.calls[0][0] != engine.calls[1][0]


def test_a_first_token_is_waited_for_one_prompt_at_a_time() -> None:
    engine = RecordingEngine()
    rows = dict(WorkloadRunner(engine.generate, 50_000).rows(FirstToken(20, 3)))
    assert list(rows) == ["first_token_20_ms"]
    assert [(len(prompts[0]), wanted) for prompts, wanted in engine.calls] == [(20, [1])] * 3


def test_a_prefill_is_the_median_of_as_many_times_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr("benchmarks.h200.workloads.time.perf_counter", lambda: next(clock))
    engine = RecordingEngine()
    rows = dict(WorkloadRunner(engine.generate, 50_000).rows(Prefill(2, 20, 3)))
    assert rows == {"prefill_2x20_median_tps": 10}
    assert [max_tokens for _, max_tokens in engine.calls] == [[1, 1]] * 3
    assert len({tuple(prompt) for prompts, _ in engine.calls for prompt in prompts}) == 6


def test_a_full_load_is_a_rate_of_output_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("benchmarks.h200.workloads.time.perf_counter", lambda: next(clock))
    engine = RecordingEngine()
    rows = dict(WorkloadRunner(engine.generate, 50_000).rows(FullLoad(5, 20, 100)))
    assert rows == {"output_5x20_100_tps": 200}
    ((prompts, wanted),) = engine.calls
    assert [len(prompt) for prompt in prompts] == [20] * 5
    assert wanted == [100] * 5


@pytest.mark.parametrize("name", ["full_load", "decode_and_load"])
def test_a_full_load_is_as_many_requests_as_run(name: str) -> None:
    loads = [one for one in WORKLOADS[name] if isinstance(one, FullLoad)]
    assert [one.num_requests for one in loads] == [MAX_RUNNING_REQUESTS]


def test_a_chat_has_prompts_and_outputs_of_all_lengths_at_once() -> None:
    engine = RecordingEngine()
    rows = dict(WorkloadRunner(engine.generate, 50_000).rows(Chat(200, (3, 6), (1, 4))))
    assert list(rows) == ["chat_200_s"]
    ((prompts, wanted),) = engine.calls
    assert {len(prompt) for prompt in prompts} == {3, 4, 5, 6}
    assert set(wanted) == {1, 2, 3, 4}


def test_an_engine_that_returns_too_few_tokens_is_an_error() -> None:
    runner = WorkloadRunner(lambda prompts, max_tokens: [n - 1 for n in max_tokens], 50_000)
    with pytest.raises(RuntimeError, match=r"\[8, 8\] ... tokens were asked for, got \[7, 7\]"):
        list(runner.rows(Batch("any", 2, 4, 8)))


def test_every_engine_draws_the_same_prompts() -> None:
    engines = RecordingEngine(), RecordingEngine()
    for engine in engines:
        runner = WorkloadRunner(engine.generate, 50_000)
        runner.warm_up(WORKLOADS["smoke"])
        for workload in WORKLOADS["smoke"]:
            list(runner.rows(workload))
    assert engines[0].calls == engines[1].calls
