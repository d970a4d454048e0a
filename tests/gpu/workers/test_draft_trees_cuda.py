"""Trees of drafts on an NVIDIA GPU: texts stay but for near ties, trees are those that the host
grows, eagerly and in graphs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.tiny_models import MIXTURES, eager_reference, save_tiny_model
from tests.gpu.engines import BUILTIN, CUDA, MIXED, NEAR_TIE, gaps_to_likeliest, prompts_of
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.unit.workers.engine.test_drafts_under_grammars import (
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_mtp import Oracle, save_target
from tests.unit.workers.engine.test_rank_trees import of_host, trees_of
from tests.unit.workers.engine.test_speculation import assert_same, mixed_requests
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.cuda_trees_runner import CudaTreesRunner
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

FIXED = {"draft_policy": "fixed", "draft_tree": (4, 3, 2)}
FLOAT32 = {"attention_backend": "torch_native", "dtype": "float32", "page_size": 4}
EAGER = {"enable_cuda_graphs": False}
TRITON = {"attention_backend": "triton"}
WHOLE = SamplingParams(temperature=0.0, max_tokens=1 + 4 * 6, ignore_eos=True)
"""Steps of whole trees whose paths hold to their ends, one after the other."""
REPEATING = [prompt[:30] * 2 for prompt in prompts_of(13, 4000)]


def started(config):
    """A rank and its engine, with all graphs that there are."""
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    assert isinstance(runner, CudaTreesRunner)
    engine = Engine.of_runner(config, runner)
    while engine.prepare_while_idle():
        pass
    return runner, engine


class TreeReplays:
    """Counts replays of graphs that draft trees and that verify them."""

    def __init__(self, runner):
        self.num_drafted = self.num_verified = 0
        drafts, verify = runner._draft_graphs, runner._verify_graphs
        if drafts is not None:
            assert drafts.num_captured == drafts.num_shapes > 0
            self._run, drafts.run = drafts.run, self._counted_run
            self._run_ahead, drafts.run_ahead = drafts.run_ahead, self._counted_ahead
        if verify is not None:
            self._replay, verify.replay = verify.replay, self._counted_replay

    def _counted_run(self, step):
        self.num_drafted += step.trees is not None
        return self._run(step)

    def _counted_ahead(self, ahead, drawn):
        self.num_drafted += 1
        return self._run_ahead(ahead, drawn)

    def _counted_replay(self, plan):
        self.num_verified += plan.has_trees
        return self._replay(plan)

    def check(self, is_graphed):
        assert (self.num_drafted > 3) == is_graphed
        assert (self.num_verified > 3) == is_graphed


def test_float32_texts_and_their_ends_are_the_same():
    """Stops, penalties, bias, least lengths and log probabilities among them; few pages, so that
    requests are retracted and found in the cache again."""
    results = {}
    for name, settings in {
        "plain": {},
        "trees": {**FIXED, "speculative": "draft:builtin-draft", "num_pages": 80},
    }.items():
        engine = Engine.from_config(EngineConfig(**BUILTIN, **FLOAT32, **settings))
        try:
            results[name] = engine.generate(*mixed_requests())
            engine.check_integrity()
            stats = engine.stats()
        finally:
            engine.close()
    assert_same(results["trees"], results["plain"])
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("settings", "is_graphed"),
    [({}, True), (EAGER, False), (TRITON, True), ({"page_size": 4, **TRITON}, True)],
    ids=["graphs", "eager", "triton", "triton-pages-of-4"],
)
def test_a_draft_that_is_the_target_is_nearly_always_right(settings, is_graphed):
    """To the last depth, as on CPU: what both models keep of a path was brought in line. Where the
    likeliest token is not in the tree, others' continuations are likelier."""
    prompts = [[*range(40, 75), 90 + index] for index in range(6)]
    config = EngineConfig(**BUILTIN, **FIXED, **settings, speculative="draft:builtin")
    runner, engine = started(config)
    replays = TreeReplays(runner)
    texts, stats = texts_of_three_rounds(engine, prompts)
    replays.check(is_graphed)
    own = {"device": "cpu", "attention_backend": None, "num_cpu_threads": 2}
    _, expected = texts_of_three_rounds(Engine.from_config(replace(config, **own)), prompts)
    gaps = gaps_to_likeliest(prompts, texts)
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert (stats.num_cached_prompt_tokens > 0) == ("page_size" in settings)
    assert stats.num_drafted_runs == pytest.approx(expected.num_drafted_runs, rel=0.05)
    for depth in range(3):
        right = stats.accepted_by_position[depth]
        assert right == pytest.approx(expected.accepted_by_position[depth], rel=0.1)


def texts_of_three_rounds(engine, prompts):
    """Of the last. The engine is closed."""
    try:
        for _ in range(3):
            texts = [one.token_ids for one in engine.generate(prompts, WHOLE)]
        engine.check_integrity()
        return texts, engine.stats()
    finally:
        engine.close()


@needs_backend("fa3")
def test_other_steps_keep_their_attention():
    runner, engine = started(EngineConfig(**BUILTIN, **FIXED, speculative="draft:builtin-draft"))
    engine.close()
    name = runner._backend.capability.name
    assert name.startswith("fa3")
    assert name.endswith("triton (draft trees)")
    assert runner._backend.captures_verify


@pytest.mark.parametrize("settings", [{}, EAGER, TRITON], ids=["graphs", "eager", "triton"])
@pytest.mark.parametrize("method", ["draft", "eagle3"])
def test_bfloat16_texts_keep_to_the_likeliest_tokens(method, settings, tmp_path):
    """Drawn ones and rules that look back along paths in the same steps."""
    of = "builtin-draft"
    if method == "eagle3":
        own = json.loads((builtin_model_path() / "config.json").read_text())
        of = save_head(tmp_path, own, [*range(5, 1000)], head_dim=32)
    runner, engine = started(
        EngineConfig(**BUILTIN, **FIXED, **settings, speculative=f"{method}:{of}")
    )
    replays = TreeReplays(runner)
    try:
        sampling = [WHOLE if index % 2 else MIXED[index % 4] for index in range(13)]
        results = engine.generate(REPEATING, sampling)
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    replays.check(settings is not EAGER)
    greedy = [index for index in range(13) if index % 2]
    texts = [results[index].token_ids for index in greedy]
    assert gaps_to_likeliest([REPEATING[index] for index in greedy], texts).max() < NEAR_TIE
    assert all(
        len(one.token_ids) == one_of.max_tokens
        for one, one_of in zip(results, sampling, strict=True)
    )
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("settings", [{}, EAGER, TRITON], ids=["graphs", "eager", "triton"])
def test_trees_that_the_host_names_keep_to_the_likeliest_tokens(settings):
    """Prompts that say things in several ways, which places that end alike go on with."""
    prompts = [[*one[:12], *one[:8], 7, *one[:12], *one[:9]] for one in prompts_of(13, 4000)]
    runner, engine = started(EngineConfig(**BUILTIN, **FIXED, **settings, speculative="suffix"))
    verified = []
    if runner._verify_graphs is not None:
        own = runner._verify_graphs.replay
        runner._verify_graphs.replay = lambda plan: verified.append(plan.has_trees) or own(plan)
    try:
        texts = [one.token_ids for one in engine.generate(prompts, WHOLE)]
        engine.check_integrity()
        stats = engine.stats()
    finally:
        engine.close()
    assert (sum(verified) > 0) == (settings is not EAGER)
    assert gaps_to_likeliest(prompts, texts).max() < NEAR_TIE
    assert stats.num_draft_tokens > 0


def test_float32_texts_with_trees_of_the_host_are_the_same():
    settings = {"plain": {}, "trees": {**FIXED, "speculative": "suffix", "num_pages": 80}}
    results = {}
    for name, own in settings.items():
        engine = Engine.from_config(EngineConfig(**BUILTIN, **FLOAT32, **own))
        try:
            results[name] = engine.generate(*mixed_requests())
            stats = engine.stats()
        finally:
            engine.close()
    assert_same(results["trees"], results["plain"])
    assert stats.num_accepted_draft_tokens > 0


def test_rows_with_a_grammar_obey_it_beside_rows_with_trees():
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
    settings = {"model": str(target), "speculative": f"eagle3:{head}"}
    return settings, HeadOracle(head, eager_reference(target))


def save_mtp(folder):
    whole = save_target(MIXTURES["glm4_moe"], folder)
    return {"model": str(folder), "speculative": "mtp"}, Oracle(folder, whole)


SMALL = {
    "draft_policy": "fixed",
    "draft_tree": (2, 3, 1),
    "num_pages": 200,
    "max_running_requests": 4,
}


@pytest.mark.parametrize(
    ("save", "least"), [(save_eagle, 0.9), (save_mtp, 0.7)], ids=["eagle", "mtp"]
)
def test_float32_trees_are_those_that_the_host_grows(save, least, tmp_path):
    """Over chunks, cached prefixes, narrower trees and none. Few may differ by near ties; more of
    a mixture's, whose products a GPU makes of float32 with 10 bits."""
    settings = {**save(tmp_path)[0], **SMALL, **FLOAT32, "max_step_tokens": 64}
    made, stats = trees_of(*started(EngineConfig(**settings)))
    grown = of_host(EngineConfig(**settings, device="cpu", num_cpu_threads=1))
    both = made.keys() & grown.keys()
    assert len(both) > 0.8 * len(made) > 12
    assert np.mean([made[text] == grown[text] for text in both]) > least
    assert stats.accepted_by_position[1] > 2
    assert stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize(
    ("settings", "is_graphed"),
    [({}, True), (EAGER, False), (TRITON, True)],
    ids=["graphs", "eager", "triton"],
)
@pytest.mark.parametrize("save", [save_eagle, save_mtp], ids=["eagle", "mtp"])
def test_trees_begin_with_what_the_published_head_takes_for_likeliest(
    save, settings, is_graphed, tmp_path
):
    """As long as states and keys of what held before stand where they should. In bfloat16 near ties
    may turn, of few tokens that may be said."""
    saved, oracle = save(tmp_path)
    config = EngineConfig(**{**saved, **SMALL, "dtype": "bfloat16", **settings})
    runner, engine = started(config)
    replays = TreeReplays(runner)
    made, stats = trees_of(runner, engine)
    replays.check(is_graphed)
    is_right = [drafts[:1] == oracle.drafts(text, 1) for text, (drafts, _) in made.items()]
    assert len(is_right) > 12
    assert np.mean(is_right) >= 0.75
    assert len({tuple(parents) for _, parents in made.values()}) > 2
    assert stats.accepted_by_position[0] > 10
