"""Drafts made before the host has read the samples: the same drafts, and the same text."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.h200.pretended_runs import ChanceDraw, PretendedRuns, pretend
from tests.fakes.compared_drafts import ComparedDrafts
from tests.fakes.launching_rank import LaunchingRank
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.graphs.verify_graphs import VerifiedStep
from workers.runner.ahead_drafts import rows_of
from workers.runner.ahead_executor import AheadDraftingExecutor
from workers.sampling.params import SamplingParams

HEAD, DRAFT = "eagle3:builtin-head", "draft:builtin-draft"
NUM_REQUESTS = 10


def config_of(**settings: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        check_integrity_when_idle=True,
        **settings,
    )


def drafting(speculative: str, policy: str = "fixed", **settings: Any) -> EngineConfig:
    return config_of(speculative=speculative, draft_policy=policy, max_draft_tokens=3, **settings)


def requests() -> list[GenerateRequest]:
    """Of all lengths, so that they come and go while others run; some draw, some count."""
    rng = random.Random(7)
    made = []
    for index in range(NUM_REQUESTS):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=index,
            max_tokens=rng.randrange(3, 48),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            ignore_eos=rng.random() < 0.7,
        )
        prompt = [rng.randrange(20, 200) for _ in range(rng.randrange(1, 40))]
        made.append(GenerateRequest(f"{index}", prompt, sampling))
    return made


def texts_of(engine: Engine) -> dict[str, list[int]]:
    """Each request is there some steps behind the one before it."""
    waiting, texts = requests(), dict[str, list[int]]()
    try:
        for _ in range(2):
            waiting, texts = requests(), {f"{index}": [] for index in range(NUM_REQUESTS)}
            while waiting or engine.has_work:
                if waiting:
                    engine.submit(waiting.pop(0))
                for _ in range(3):
                    for output in engine.step():
                        texts[output.request_id] += output.token_ids
    finally:
        engine.close()
    return texts


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, list[int]]:
    return texts_of(Engine.from_config(config_of()))


@pytest.mark.parametrize(
    ("speculative", "policy"),
    [(HEAD, "fixed"), pytest.param(HEAD, "adaptive", marks=pytest.mark.nightly), (DRAFT, "fixed")],
)
def test_drafts_and_texts_are_those_of_known_lengths(
    speculative: str,
    policy: str,
    plain_texts: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = LaunchingRank(drafting(speculative, policy, page_size=8), monkeypatch)
    compared = ComparedDrafts(rank, monkeypatch)
    assert texts_of(rank.engine()) == plain_texts
    assert compared.num_equal > 30


def test_drafts_that_there_is_no_memory_to_make_ahead_are_made_later(
    plain_texts: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = LaunchingRank(drafting(HEAD), monkeypatch)
    engine = rank.engine()
    graphs = rank._draft_graphs
    assert graphs is not None

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(graphs, "run_ahead", fail)
    assert texts_of(engine) == plain_texts
    assert "no memory to make drafts" in caplog.text


def test_rows_of_fewer_drafts_than_graphs_have_are_not_drafted_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fills their rows up would go on from what may be no number."""
    rank = LaunchingRank(drafting(HEAD), monkeypatch)
    engine, compared = rank.engine(), ComparedDrafts(rank, monkeypatch)
    asked = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    try:
        for index in range(2):
            prompt = [*range(20, 40), 60 + index]
            engine.submit(GenerateRequest(f"{index}", prompt, asked, max_draft_tokens=1))
        while engine.has_work:
            engine.step()
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.num_draft_tokens > 5
    assert rank.verifies.num_replays > 5
    assert compared.num_equal == 0


def test_a_step_without_drafts_sends_none_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a draft model reads its tokens, in a graph of drafts."""
    rank = LaunchingRank(drafting(DRAFT), monkeypatch)
    engine = rank.engine()
    asked = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    try:
        for turn in range(2):
            if turn:
                rank.watch()
            prompt = list(range(20, 50))
            engine.submit(GenerateRequest(f"{turn}", prompt, asked, max_draft_tokens=0))
            while engine.has_work:
                engine.step()
    finally:
        engine.close()
    assert rank.log.count("drafted") > 5
    assert "sent" not in rank.log


def check_pretended(rank: LaunchingRank, chance: float) -> None:
    """Runs are as long as they are drawn, on the device as on the host."""
    engine, runs = rank.engine(), PretendedRuns()
    assert isinstance(engine._executor, AheadDraftingExecutor)
    pretend(engine, runs)
    runs.draw = ChanceDraw(chance)
    try:
        asked = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        results = engine.generate([[5, 6, 7], [8, 9], [10, 11, 12, 13]], [asked] * 3)
        stats = engine.stats()
    finally:
        engine.close()
    assert [len(one.token_ids) for one in results] == [80] * 3
    assert not runs.drawn_ahead
    assert stats.num_accepted_draft_tokens == runs.held.num_tokens - runs.held.num_rows


def test_pretended_runs_are_the_same_on_the_device_and_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = LaunchingRank(drafting(HEAD), monkeypatch)
    compared = ComparedDrafts(rank, monkeypatch)
    check_pretended(rank, 0.6)
    assert compared.num_equal > 20


def test_rows_of_a_longer_graph_have_their_own_samples() -> None:
    """Three rows of three tokens, in a graph of five a row."""
    sampled = torch.arange(20, dtype=torch.int32)
    slot = SimpleNamespace(device_sampled=sampled)
    places = np.array([0, 1, 2, 5, 6, 7, 10, 11, 12])
    drafts = torch.zeros(3, 2, dtype=torch.int64)
    found = rows_of(drafts, VerifiedStep(slot, 1, places))  # type: ignore[arg-type]
    assert found.sampled.tolist() == [[0, 1, 2], [5, 6, 7], [10, 11, 12]]
    alone = rows_of(drafts[:1], VerifiedStep(slot, 1, places[:3]))  # type: ignore[arg-type]
    assert alone.sampled.tolist() == [[0, 1, 2]]
