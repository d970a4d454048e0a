"""What an engine with a head sends to the device for a plain step: no more than one without."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fakes.launching_rank import Launches, LaunchingRank, LaunchingRunner
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.graphs.ring import UploadRing
from workers.runner import rank_drafts_runner
from workers.sampling import transfer
from workers.sampling.params import SamplingParams
from workers.speculation.device_step import DrafterStep

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
HEAD = {"speculative": "eagle3:builtin-head"}
NONE = {"speculative": "ngram"}


def run_plainly(engine: Engine, sampling: SamplingParams) -> None:
    for index in range(3):
        prompt = [*range(20, 50), 60 + index]
        engine.submit(GenerateRequest(f"{index}", prompt, sampling, max_draft_tokens=0))
    while engine.has_work:
        engine.step()


def watch_uploads(rank: LaunchingRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes them. On the CPU they are no operations."""
    own = transfer.upload
    told = rank.told("uploaded", own)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("upload") is own:
            monkeypatch.setattr(module, "upload", told)
    monkeypatch.setattr(UploadRing, "send", rank.told("uploaded", UploadRing.send))


def steps_of(
    settings: dict[str, Any],
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> list[list[str]]:
    """What the host did for each of a few plain steps, from one launch to the next one."""
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        draft_policy="fixed",
        max_draft_tokens=3,
        **settings,
    )
    rank_class = LaunchingRank if settings is HEAD else LaunchingRunner
    rank = rank_class(config, monkeypatch)
    engine = rank.engine()
    try:
        run_plainly(engine, sampling)
        graphs, launches = rank._graphs, Launches(rank.log)
        assert graphs is not None
        for key, graph in graphs._graphs.items():
            replay = rank.told("replayed", launches.within(graph.replay))
            graphs._graphs[key] = replace(graph, replay=replay)
        monkeypatch.setattr(rank_drafts_runner, "DrafterStep", rank.told("step", DrafterStep))
        watch_uploads(rank, monkeypatch)
        rank.log.clear()
        with launches:
            run_plainly(engine, sampling)
    finally:
        engine.close()
    starts = np.flatnonzero([what == "replayed" for what in rank.log])
    steps = [rank.log[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]
    assert len(steps) > 15
    return steps[2:]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_plain_step_is_what_it_is_without_a_head(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        plain = steps_of(NONE, sampling, patches)
    with monkeypatch.context() as patches:
        headed = steps_of(HEAD, sampling, patches)
    assert headed == plain
    if sampling is GREEDY:
        assert {what for step in headed for what in step} <= {
            "replayed",
            "recorded",
            "awaited",
            "timed",
        }
