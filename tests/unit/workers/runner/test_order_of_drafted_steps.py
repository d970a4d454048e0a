"""What stands between the samples of a step with drafts and the launch of the one behind it."""

from contextlib import nullcontext

import pytest

from tests.fakes.launching_rank import Launches, LaunchingRank
from workers.config import EngineConfig
from workers.graphs import draft_graphs, drafted_verify_graphs
from workers.runner.drafting_executor import DraftingExecutor
from workers.sampling.params import SamplingParams
from workers.sampling.transfer import upload
from workers.speculation import device_step
from workers.speculation.ahead import AheadRows

LAUNCHED = ["awaited", "recorded", "verified", "recorded", "behind", "timed", "timed"]
STEP = [*LAUNCHED, "drafted", "sent", "planned", "named"]
"""From the wait for the samples of the step before on. The second mark is the step's end, for which
who reads its samples waits; behind it come what a head reads, when the step before began and ended,
the next step's drafts, which are sent to the host, all that is known of its plan before, and which
drafts these are."""
BEHIND_SAMPLES = [one for one in STEP if one not in ("drafted", "sent")]
BEFORE_DRAFTS = [*STEP[:2], "drafted", "sent", *BEHIND_SAMPLES[2:]]
"""Of a step whose drafts nobody could make ahead."""


def watched_steps(monkeypatch: pytest.MonkeyPatch, with_launches: bool) -> list[list[str]]:
    """Whole ones that verify drafts of a few rows behind others that do, all in graphs. Texts stay
    what they are."""
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        speculative="eagle3:builtin-head",
        draft_policy="fixed",
        max_draft_tokens=3,
    )
    rank = LaunchingRank(config, monkeypatch)
    engine = rank.engine()
    executor = engine._executor
    assert isinstance(executor, DraftingExecutor)
    prompts = [[*range(20, 50), 60 + index] for index in range(3)]
    asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    try:
        first = [one.token_ids for one in engine.generate(prompts, asked)]
        rank.watch()
        monkeypatch.setattr(executor._runs, "planned", rank.told("planned", executor._runs.planned))
        monkeypatch.setattr(executor, "_name_drafts", rank.told("named", executor._name_drafts))
        # On the CPU, an upload is no operation.
        for module in (draft_graphs, drafted_verify_graphs, device_step):
            monkeypatch.setattr(module, "upload", rank.told("uploaded", upload))
        with Launches(rank.log) if with_launches else nullcontext():
            again = engine.generate(prompts, asked)
        assert [one.token_ids for one in again] == first
    finally:
        engine.close()
    starts = [index for index, what in enumerate(rank.log) if what == "awaited"]
    steps = [rank.log[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]
    drafted = [step for step in steps if "verified" in step]
    assert len(drafted) > 5
    return drafted[1:]


def test_what_can_be_done_before_the_samples_come_is_not_done_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor drafts, but of the first step with any, of what follows one that another length or a
    clearing cuts off, and of the last ones."""
    steps = watched_steps(monkeypatch, with_launches=False)
    told = [[what for what in step if what in STEP] for step in steps]
    assert all(step in (STEP, BEHIND_SAMPLES, BEFORE_DRAFTS) for step in told), told
    assert sum(step == STEP for step in told) > 3


def test_behind_samples_the_device_is_sent_the_names_of_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else stands between them and the target's pass, but where there are more rows than
    before, or fewer."""
    steps = watched_steps(monkeypatch, with_launches=True)
    between = [step[: step.index("verified")] for step in steps]
    own = [step for step in between if "drafted" not in step]
    same, others = (["awaited", "recorded", *more, "aten::copy_"] for more in ([], ["aten::fill_"]))
    assert own.count(same) > 3
    assert all(step in (same, others) for step in own), own


def test_ahead_of_drafts_the_device_is_sent_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that could not be made before the samples came."""
    monkeypatch.setattr(AheadRows, "of", lambda plan, before, runs: None)
    steps = watched_steps(monkeypatch, with_launches=True)
    ahead = [step[: step.index("drafted")] for step in steps]
    # What a request leaves behind that has ended is cleared by whichever step comes next.
    own = [step for step in ahead if "aten::index_fill_" not in step]
    assert len(own) > 5
    assert all(step == ["awaited", "recorded", "aten::copy_"] for step in own), own
    # Nor is anything uploaded until the target's pass is launched behind them, but where a row has
    # fewer drafts than others: towards its end.
    between = [step[step.index("drafted") : step.index("verified")] for step in steps[:3]]
    assert not any("uploaded" in step for step in between), between
