"""Drafts by a model or a head on an NVIDIA GPU: texts stay but for near ties, drafts are those that
the same model makes elsewhere, eagerly and in graphs."""

import json

import numpy as np
import pytest

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.tiny_models import LATENT, MIXTURES, eager_reference, save_tiny_model
from tests.gpu.engines import (
    BUILTIN,
    CUDA,
    GREEDY,
    MIXED,
    NEAR_TIE,
    gaps_to_likeliest,
    prompts_of,
)
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.unit.workers.engine.test_draft_model import PROMPTS
from tests.unit.workers.engine.test_drafts_under_grammars import (
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_mtp import Oracle, save_target
from tests.unit.workers.engine.test_rank_drafts import FEW_PAGES, recorded_run
from tests.unit.workers.engine.test_speculation import assert_same, mixed_requests
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

FIXED = {"draft_policy": "fixed", "max_draft_tokens": 3}
FLOAT32 = {"attention_backend": "torch_native", "dtype": "float32", "page_size": 4}
REPEATING = [prompt[:30] * 2 for prompt in prompts_of(13, 4000)]


def started(config, captures=True):
    """A rank and its engine, with all graphs that there are."""
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    while captures and engine.prepare_while_idle():
        pass
    return runner, engine


class DraftReplays:
    """Counts those of a rank's draft graphs, which are gone once its engine is closed."""

    def __init__(self, runner):
        self.num = 0
        self._graphs = runner._draft_graphs
        if self._graphs is not None:
            assert self._graphs.num_captured == self._graphs.num_shapes > 0
            self._graphs.run = self._counted(self._graphs.run)
            self._graphs.run_ahead = self._counted(self._graphs.run_ahead)

    def _counted(self, run):
        def counted(*arguments):
            self.num += 1
            return run(*arguments)

        return counted


def builtin_head(folder):
    own = json.loads((builtin_model_path() / "config.json").read_text())
    return save_head(folder, own, [*range(5, 1000)], head_dim=32)


def test_float32_texts_and_their_ends_are_the_same() -> None:
    """Stops, penalties, bias, least lengths and log probabilities among them; few pages, so that
    requests are retracted and found in the cache again."""
    results = {}
    for name, settings in {
        "plain": {},
        "drafted": {**FIXED, "speculative": "draft:builtin-draft", "num_pages": 60},
    }.items():
        engine = Engine.from_config(EngineConfig(**BUILTIN, **FLOAT32, **settings))
        try:
            results[name] = engine.generate(*mixed_requests())
            engine.check_integrity()
            stats = engine.stats()
        finally:
            engine.close()
    assert_same(results["drafted"], results["plain"])
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("settings", "is_graphed"),
    [({}, True), ({"enable_cuda_graphs": False}, False), ({"attention_backend": "triton"}, True)],
    ids=["graphs", "eager", "triton"],
)
def test_a_draft_that_is_the_target_is_nearly_always_right(settings, is_graphed) -> None:
    """Over graphs of other sizes than the target's own steps, cached prefixes and retraction; what
    is drawn stays what is likely."""
    pages = {"page_size": 4, "num_pages": 34, "max_step_tokens": 40}
    config = EngineConfig(**BUILTIN, **FIXED, **settings, **pages, speculative="draft:builtin")
    runner, engine = started(config)
    replays = DraftReplays(runner)
    try:
        for _ in range(2):
            greedy = engine.generate(PROMPTS, GREEDY)
        right = engine.stats()
        engine.generate(REPEATING[:12], MIXED * 3)
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    assert (replays.num > 3) == is_graphed
    gaps = gaps_to_likeliest(PROMPTS, [one.token_ids for one in greedy])
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert stats.num_preemptions > 0
    assert right.num_cached_prompt_tokens > 0
    assert right.num_accepted_draft_tokens > 0.9 * right.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["draft", "eagle3"])
def test_bfloat16_drafts_keep_to_the_likeliest_tokens(method, tmp_path) -> None:
    """Drawn ones and rules that look back in the same steps."""
    of = "builtin-draft" if method == "draft" else builtin_head(tmp_path)
    runner, engine = started(EngineConfig(**BUILTIN, **FIXED, speculative=f"{method}:{of}"))
    replays = DraftReplays(runner)
    try:
        sampling = [GREEDY if index % 2 else MIXED[index % 4] for index in range(13)]
        results = engine.generate(REPEATING, sampling)
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    assert replays.num > 3
    greedy = [index for index in range(13) if index % 2]
    texts = [results[index].token_ids for index in greedy]
    gaps = gaps_to_likeliest([REPEATING[index] for index in greedy], texts)
    assert gaps.max() < NEAR_TIE
    assert stats.num_draft_tokens > 0


def test_rows_with_a_grammar_obey_it_behind_drafts_of_the_device() -> None:
    engine = Engine.from_config(EngineConfig(**BUILTIN, **FIXED, speculative="draft:builtin-draft"))
    try:
        check_grammars(results_under_grammars(engine))
        assert engine.stats().num_accepted_draft_tokens > 0
    finally:
        engine.close()


def save_eagle(folder):
    target = save_tiny_model(DEEP, folder / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(folder / "head", own, DRAFT_IDS)
    return target, f"eagle3:{head}", HeadOracle(head, eager_reference(target))


def save_mtp(tiny, folder):
    return folder, "mtp", Oracle(folder, save_target(tiny, folder))


@pytest.mark.parametrize(
    ("save", "settings", "least", "is_graphed"),
    [
        (save_eagle, {**FLOAT32}, 1.0, False),
        (save_eagle, {}, 0.8, True),
        (save_eagle, {"enable_cuda_graphs": False}, 0.8, False),
        (save_eagle, {"attention_backend": "triton"}, 0.8, True),
        (lambda folder: save_mtp(LATENT["deepseek_v3"], folder), {**FLOAT32}, 1.0, False),
        (lambda folder: save_mtp(MIXTURES["glm4_moe"], folder), {**FLOAT32}, 1.0, False),
        (lambda folder: save_mtp(MIXTURES["glm4_moe"], folder), {}, 0.8, True),
    ],
    ids=[
        "eagle-float32",
        "eagle-graphs",
        "eagle-eager",
        "eagle-triton",
        "mtp-latents-float32",
        "mtp-float32",
        "mtp-graphs",
    ],
)
def test_drafts_are_the_published_ones(save, settings, least, is_graphed, tmp_path) -> None:
    """Over chunks, cached prefixes, retraction, right drafts before and none at all. In bfloat16
    near ties may turn, of few tokens that may be said."""
    target, speculative, oracle = save(tmp_path)
    config = EngineConfig(
        model=str(target),
        speculative=speculative,
        **{"dtype": "bfloat16", **FIXED, **FEW_PAGES, **settings},
    )
    runner, engine = started(config)
    replays = DraftReplays(runner)
    asked, stats = recorded_run(runner, engine)
    assert (replays.num > 3) == is_graphed
    pairs = [(one.drafts, oracle.drafts(one.token_ids, len(one.drafts))) for one in asked[::3]]
    is_right = [found == wanted for found, wanted in pairs]
    assert len(is_right) > 6
    assert np.mean(is_right) >= least
    assert stats.num_accepted_draft_tokens > 10
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0


@needs_backend("fa3")
def test_no_row_of_a_draft_graph_disturbs_another_ones() -> None:
    """Rows of unlike room, as of requests with fewer drafts, in graphs of more drafts and rows; a
    draft that is its target tells of every key that is lost."""
    config = EngineConfig(
        **BUILTIN, draft_policy="fixed", max_draft_tokens=7, speculative="draft:builtin"
    )
    ends = [
        SamplingParams(temperature=0.0, max_tokens=2 + 3 * index, ignore_eos=True)
        for index in range(11)
    ]
    runner, engine = started(config)
    replays = DraftReplays(runner)
    try:
        for _ in range(3):
            results = engine.generate(REPEATING[:11], ends)
        stats = engine.stats()
        engine.check_integrity()
    finally:
        engine.close()
    assert replays.num > 3
    texts = [one.token_ids for one in results]
    assert gaps_to_likeliest(REPEATING[:11], texts).max() < NEAR_TIE
    assert [len(one) for one in texts] == [one.max_tokens for one in ends]
    assert stats.num_accepted_draft_tokens > 0.85 * stats.num_draft_tokens
