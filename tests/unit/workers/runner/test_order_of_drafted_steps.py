"""What stands between the samples of a step with drafts and the launch of the one behind it."""

import pytest

from tests.fakes.launching_rank import LaunchingRank
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams


def watched_rank(monkeypatch: pytest.MonkeyPatch) -> LaunchingRank:
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        speculative="eagle3:builtin-head",
        draft_policy="fixed",
        max_draft_tokens=3,
    )
    return LaunchingRank(config, monkeypatch)


def steps_of(log: list[str]) -> list[list[str]]:
    """Each from the wait for the samples of the one before on; whole ones."""
    starts = [index for index, what in enumerate(log) if what == "awaited"]
    return [log[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]


def test_samples_do_not_wait_for_what_is_read_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = watched_rank(monkeypatch)
    engine = rank.engine()
    prompts = [[*range(20, 50), 60 + index] for index in range(3)]
    asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    try:
        first = engine.generate(prompts, asked)
        rank.watch()
        assert [one.token_ids for one in engine.generate(prompts, asked)] == [
            one.token_ids for one in first
        ]
    finally:
        engine.close()
    drafted = [step for step in steps_of(rank.log) if "verified" in step]
    assert len(drafted) > 5
    # The second mark is the step's end, for which who reads the samples waits.
    around = ["awaited", "recorded", "drafted", "verified", "recorded", "behind"]
    assert all(step == around for step in drafted), drafted
