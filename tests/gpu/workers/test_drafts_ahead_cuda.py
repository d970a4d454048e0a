"""Drafts made on an NVIDIA GPU before the host has read the samples that they go on from."""

import random
from itertools import cycle

import pytest

from tests.fakes.compared_drafts import ComparedDrafts
from tests.gpu.engines import BUILTIN, GREEDY, MIXED, NEAR_TIE, gaps_to_likeliest, prompts_of
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.gpu.workers.test_draft_models_cuda import FIXED, started
from tests.gpu.workers.test_draft_trees_cuda import started as trees_started
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams
from workers.scheduler import scheduler
from workers.speculation.policy import FixedLength

pytestmark = [*NEEDS_GPU, needs_backend("fa3")]

METHODS = ["eagle3:builtin-head", "draft:builtin-draft", "draft:builtin"]
PROMPTS = prompts_of(13, 4000)


@pytest.mark.parametrize("speculative", METHODS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_they_are_those_of_known_lengths(speculative, drawn, monkeypatch) -> None:
    """Of all rows together, and of those that are left as others end. Rows about to end have fewer
    drafts than others, beside which none are made ahead: the first of them ends late."""
    runner, engine = started(EngineConfig(**BUILTIN, **FIXED, speculative=speculative))
    compared = ComparedDrafts(runner, monkeypatch)
    lengths = random.Random(3).choices(range(160, 260), k=len(PROMPTS))
    asked = [
        SamplingParams(
            temperature=1.0 if drawn else 0.0, seed=index, max_tokens=length, ignore_eos=True
        )
        for index, length in enumerate(lengths)
    ]
    try:
        results = engine.generate(PROMPTS, asked)
        engine.check_integrity()
    finally:
        engine.close()
    assert [len(one.token_ids) for one in results] == lengths
    assert compared.num_equal > 20
    if not drawn:
        texts = [one.token_ids for one in results]
        assert gaps_to_likeliest(PROMPTS, texts).max() < NEAR_TIE


@pytest.mark.parametrize("speculative", METHODS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_trees_are_those_of_known_lengths(speculative, drawn, monkeypatch) -> None:
    """While all rows have the whole tree: the device lines up the path that holds and goes on."""
    settings = {"draft_policy": "fixed", "draft_tree": (4, 3, 2), "speculative": speculative}
    runner, engine = trees_started(EngineConfig(**BUILTIN, **settings))
    compared = ComparedDrafts(runner, monkeypatch)
    asked = [
        SamplingParams(
            temperature=1.0 if drawn else 0.0, seed=index, max_tokens=90, ignore_eos=True
        )
        for index in range(len(PROMPTS))
    ]
    try:
        results = engine.generate(PROMPTS, asked)
        engine.check_integrity()
    finally:
        engine.close()
    assert [len(one.token_ids) for one in results] == [90] * len(PROMPTS)
    assert compared.num_equal > 5
    if not drawn:
        texts = [one.token_ids for one in results]
        assert gaps_to_likeliest(PROMPTS, texts).max() < NEAR_TIE


class LengthsByTurns(FixedLength):
    """Whatever steps take: a draft that is its target does not pay."""

    def __init__(self):
        super().__init__(3)
        self._lengths = cycle((3, 3, 3, 0, 2, 2, 1))

    def choose(self, most):
        return next(self._lengths)


def test_requests_come_and_go_beside_them(monkeypatch) -> None:
    """Lengths change; prompts, drawn rows and rules that look back are among them."""
    monkeypatch.setattr(scheduler, "make_policy", lambda *config: LengthsByTurns())
    config = EngineConfig(**BUILTIN, max_draft_tokens=3, speculative="draft:builtin", num_pages=300)
    runner, engine = started(config)
    compared = ComparedDrafts(runner, monkeypatch)
    waiting = [
        GenerateRequest(f"{index}", PROMPTS[index % 13], MIXED[index % 4] if index % 3 else GREEDY)
        for index in range(40)
    ]
    num_ended = 0
    try:
        while waiting or engine.has_work:
            if waiting:
                engine.submit(waiting.pop(0))
            for _ in range(6):
                num_ended += sum(one.finish_reason is not None for one in engine.step())
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    assert num_ended == 40
    assert compared.num_equal > 10
    assert stats.num_accepted_draft_tokens > 0
