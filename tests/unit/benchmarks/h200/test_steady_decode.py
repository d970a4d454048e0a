"""Times a token while all streams run, whatever luck their drafts have."""

import time
from collections.abc import Callable

import pytest

from benchmarks.h200.drafted_decode import DraftsAsked
from benchmarks.h200.pretended_runs import ChanceDraw, PretendedRuns, pretend
from benchmarks.h200.steady_decode import RunningStreams, SteadyDecode, shares_of_best
from tests.fakes.rank_drafts import ReplayingRank
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import StepOutput

ASKED = DraftsAsked("tessera", "chain of 3", 4, 2.0)
STEP_S = 0.01
FEW_TOKENS = 10
"""As drafted_decode.FEW_TOKENS: more than two chains' drafts."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("benchmarks.h200.steady_decode.VOCAB_SIZE", 500)
    monkeypatch.setattr("benchmarks.h200.steady_decode.FEW_TOKENS", FEW_TOKENS)
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        speculative="eagle3:builtin-head",
        draft_policy="fixed",
        enable_prefix_cache=False,
        max_draft_tokens=3,
        max_running_requests=4,
        page_size=1,
    )
    return ReplayingRank(config).engine()


class SteppedClock:
    """A clock by which each step takes STEP_S."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def stepping(self, step: Callable[[], list[StepOutput]]) -> Callable[[], list[StepOutput]]:
        def stepped() -> list[StepOutput]:
            self.now_s += STEP_S
            return step()

        return stepped


# Few tokens where nothing is left to chance.
@pytest.mark.parametrize(("chance", "num_tokens"), [(0.0, 8), (0.6, 40), (1.0, 24)])
def test_a_token_takes_a_steps_time_by_what_steps_bring_on_average(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, chance: float, num_tokens: int
) -> None:
    clock, runs = SteppedClock(), PretendedRuns()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(engine, "step", clock.stepping(engine.step))
    pretend(engine, runs)
    runs.draw = ChanceDraw(chance)
    try:
        row = SteadyDecode(engine, lambda: runs.held).row(ASKED, 3, num_tokens, 2, 12)
        assert not engine.has_work
    finally:
        engine.close()
    brought = 1 + chance + chance**2 + chance**3
    # A step is drawn before it is committed.
    assert row["ms_a_token"] == pytest.approx(STEP_S * 1e3 / brought, rel=0.1)
    assert len(row["all_ms"]) == 2
    assert row["tokens_a_step"] == pytest.approx(brought, rel=0.25)


@pytest.mark.parametrize("warm_up_tokens", [5, 20])
def test_streams_are_as_long_whatever_was_learnt_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, warm_up_tokens: int
) -> None:
    runs, lengths = PretendedRuns(), []
    pretend(engine, runs)

    class Watched(RunningStreams):
        def end(self) -> None:
            lengths.append(self.fewest)
            super().end()

    monkeypatch.setattr("benchmarks.h200.steady_decode.RunningStreams", Watched)
    try:
        SteadyDecode(engine, lambda: runs.held).row(ASKED, 2, 8, 2, warm_up_tokens)
    finally:
        engine.close()
    assert lengths[0] >= warm_up_tokens
    assert FEW_TOKENS + 2 * 8 <= lengths[1] < FEW_TOKENS + 2 * 8 + 5


def run_until(streams: RunningStreams, num_tokens: int) -> None:
    while streams.fewest < num_tokens:
        streams.step()


def test_streams_that_end_are_refused(engine: Engine) -> None:
    streams = RunningStreams(engine, 2, max_tokens=5)
    try:
        with pytest.raises(RuntimeError, match="stream-0 has ended"):
            run_until(streams, 6)
        streams.end()
        assert not engine.has_work
    finally:
        engine.close()


def test_shares_are_of_the_fastest_of_plain_and_fixed_lengths() -> None:
    def row(drafts: str, streams: int, acceptance: float | None, ms: float) -> dict[str, object]:
        return {
            "drafts": drafts,
            "streams": streams,
            "acceptance": acceptance,
            "ms_a_token": ms,
        }

    rows = [
        row("plain", 1, None, 4.0),
        row("chain of 1", 1, 3.0, 3.0),
        row("chain of 3", 1, 3.0, 2.0),
        row("chain of 3", 1, 1.0, 8.0),
        row("tree of 4+4", 1, 3.0, 1.0),
        row("adaptive", 1, 3.0, 2.5),
        row("adaptive", 1, 1.0, 5.0),
        row("adaptive", 8, 1.0, 5.0),
    ]
    assert [tuple(one.values()) for one in shares_of_best(rows)] == [
        (1, 3.0, "chain of 3", 0.8, 1.6),
        (1, 1.0, "plain", 0.8, 0.8),
        (8, 1.0, None, None, None),
    ]
