"""An engine whose further ranks are child processes: the text of one rank, and no child left."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from llguidance import LLMatcher

from tests.fakes.dflash_drafters import save_drafter
from tests.nightly.random_schemas import generated
from tests.nightly.schema_outputs import Way, count_valid, taken
from tests.unit.workers.engine.test_grammars import run_together
from tests.unit.workers.engine.test_late_masks import make_late, requests
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.errors import EngineFailedError
from workers.parallel.local_followers import LocalFollowers, start_local_followers
from workers.parallel.tp_engine import build_tp_engine
from workers.pooling.params import DECODER_POOLINGS, PoolingParams
from workers.sampling.params import SamplingParams

PROMPTS = [[5, 17, 400, 23, 9, 80], [7, 7, 31], list(range(40, 90))]
END_S = 20.0


def config_for(
    tp_size: int, speculative: str | None = None, draft_tree: tuple[int, ...] = ()
) -> EngineConfig:
    return EngineConfig(
        tp_size=tp_size,
        max_running_requests=4,
        kv_cache_bytes=8 << 20,
        num_cpu_threads=1,
        speculative=speculative,
        draft_policy="fixed",
        draft_tree=draft_tree,
    )


class Starter:
    """start_local_followers that keeps what it started."""

    def __init__(self) -> None:
        self.followers: list[LocalFollowers] = []

    def __call__(self, config: EngineConfig, directory: Path, auth_key: bytes) -> LocalFollowers:
        self.followers.append(start_local_followers(config, directory, auth_key))
        return self.followers[0]


@contextmanager
def engine_of_two(
    starter: Starter,
    lost: threading.Event,
    speculative: str | None = None,
    draft_tree: tuple[int, ...] = (),
) -> Iterator[Engine]:
    config = config_for(2, speculative, draft_tree)
    engine = build_tp_engine(
        config, starter, lambda rank: lost.set(), lambda record: None, lambda done, total: None
    )
    try:
        yield engine
    finally:
        engine.close()


def test_text_and_vectors_are_those_of_one_rank_and_children_end_with_the_engine():
    """And the text of rows that are run again for masks that are late."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = Engine.from_config(config_for(1))
    expected = [result.token_ids for result in alone.generate(PROMPTS, params)]
    vectors = [alone.embed(PROMPTS, PoolingParams(method)) for method in DECODER_POOLINGS]
    constrained = [result.token_ids for result in run_together(alone, *requests())]
    alone.close()
    starter, lost = Starter(), threading.Event()
    with engine_of_two(starter, lost) as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
        check_vectors(engine, vectors)
        check_late_masks(engine, constrained)
        assert not starter.followers[0].wait_for_end(0.0)
    assert starter.followers[0].wait_for_end(END_S)
    assert not lost.is_set()
    assert not dist.is_initialized(), "a process that ends within a group of ranks may hang"


def check_late_masks(engine: Engine, expected: list[list[int]]) -> None:
    again = make_late(engine)
    assert [result.token_ids for result in run_together(engine, *requests())] == expected
    assert again.request_ids
    assert count_valid(engine, taken([generated(0)]), Way(num_choices=2)) == 2


def check_vectors(engine: Engine, expected: list[list[GenerateResult]]) -> None:
    for method, of_method in zip(DECODER_POOLINGS, expected, strict=True):
        results = engine.embed(PROMPTS, PoolingParams(method))
        for result, one in zip(results, of_method, strict=True):
            np.testing.assert_allclose(result.embedding, one.embedding, atol=1e-5)


def answer_of(engine: Engine) -> list[int]:
    """Under a grammar, whose masks all ranks need."""
    request = GenerateRequest(
        "answer",
        PROMPTS[0],
        SamplingParams(temperature=1.0, seed=5, max_tokens=24),
        grammar=LLMatcher.grammar_from_regex("[a-z]{1,4} (yes|no)"),
    )
    collector = ResultCollector()
    engine.submit(request)
    collector.expect(request.request_id)
    while collector.is_waiting or engine.has_work:
        collector.add(engine.step())
    (result,) = collector.results()
    assert result.finish_reason is FinishReason.STOP
    return result.token_ids


def test_ranks_propose_verify_and_mask_alike(tmp_path: Path):
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=24, ignore_eos=True)
    alone = Engine.from_config(config_for(1))
    expected = [result.token_ids for result in alone.generate(PROMPTS, params)]
    answer = answer_of(alone)
    alone.close()
    blocks = save_drafter(tmp_path, json.loads((builtin_model_path() / "config.json").read_text()))
    for method, tree in (
        ("suffix", ()),
        ("draft:builtin-draft", (3, 3, 2)),
        (f"dflash:{blocks}", ()),
    ):
        with engine_of_two(Starter(), threading.Event(), method, tree) as engine:
            assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
            assert engine.stats().num_draft_tokens > 0
            assert answer_of(engine) == answer


def test_a_child_that_ends_before_it_joins_is_an_error():
    def start(config: EngineConfig, directory: Path, auth_key: bytes) -> LocalFollowers:
        return start_local_followers(config, directory / "elsewhere", auth_key)

    with pytest.raises(EngineFailedError, match="ended before it joined"):
        build_tp_engine(
            config_for(2), start, lambda rank: None, lambda record: None, lambda done, total: None
        )
