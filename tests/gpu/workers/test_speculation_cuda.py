"""Drafts on an NVIDIA GPU change no text, over graphs and eagerly, in every company."""

import pytest

from tests.gpu.engines import (
    BUILTIN,
    CUDA,
    GREEDY,
    NEAR_TIE,
    NUM_TOKENS,
    gaps_to_likeliest,
    generate,
    prompts_of,
    share_equal,
)
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.unit.workers.engine.test_drafts_under_grammars import (
    CountedDrafts,
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_speculation import assert_same, mixed_requests
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

DRAFTS = {"speculative": "ngram", "draft_policy": "fixed"}
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
REPEATING = [prompt[:30] * 2 for prompt in prompts_of(13, 4000)]


def results_of(config, prompts, sampling):
    engine = Engine.from_config(config)
    try:
        results = engine.generate(prompts, sampling)
        engine.check_integrity()
        return results, engine.stats()
    finally:
        engine.close()


def test_float32_texts_and_their_ends_are_the_same() -> None:
    """Stops, penalties, bias, least lengths and log probabilities among them; few pages, so that
    requests are retracted and found in the cache again."""
    base = {"attention_backend": "torch_native", "dtype": "float32", "page_size": 4}
    plain, _ = results_of(EngineConfig(**BUILTIN, **base), *mixed_requests())
    for settings in ({"num_pages": 60}, {"speculative": "suffix", "max_step_tokens": 48}):
        config = EngineConfig(**BUILTIN, **base, **{**DRAFTS, **settings})
        results, stats = results_of(config, *mixed_requests())
        assert_same(results, plain)
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
        assert stats.num_preemptions > 0 or "num_pages" not in settings


@pytest.mark.parametrize(
    "settings",
    [{"attention_backend": "torch_native", "dtype": "float32"}, {"attention_backend": "triton"}],
    ids=["float32", "graphs"],
)
def test_rows_with_a_grammar_have_drafts_and_obey_it(settings) -> None:
    """Of which in float32 every text, with its log probabilities, is the one without drafts."""
    is_exact = "dtype" in settings
    drafted = Engine.from_config(EngineConfig(**BUILTIN, **settings, **DRAFTS))
    counted = CountedDrafts(drafted)
    try:
        results = results_under_grammars(drafted)
    finally:
        drafted.close()
    assert counted.num_allowed > 20
    check_grammars(results)
    if is_exact:
        plain = Engine.from_config(EngineConfig(**BUILTIN, **settings))
        try:
            assert_same(results, results_under_grammars(plain))
        finally:
            plain.close()


@pytest.mark.parametrize(
    ("settings", "is_replayed"),
    [({}, True), ({"enable_cuda_graphs": False}, False), ({"attention_backend": "triton"}, True)],
    ids=["graphs", "eager", "triton"],
)
def test_bfloat16_drafts_keep_to_the_likeliest_tokens(settings, is_replayed) -> None:
    """Steps of other sizes take other kernels: near ties may turn."""
    config = EngineConfig(**BUILTIN, **DRAFTS, **settings)
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    try:
        while engine.prepare_while_idle():
            pass
        greedy = engine.generate(REPEATING, GREEDY)
        mixed = engine.generate(REPEATING, [GREEDY, SEEDED] * 6 + [GREEDY])
        engine.check_integrity()
        stats = engine.stats()
        graphs = runner._verify_graphs
        assert (graphs is not None and graphs._replayed is not None) == is_replayed
    finally:
        engine.close()
    texts = [one.token_ids for one in greedy]
    gaps = gaps_to_likeliest(REPEATING, texts)
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    plain = generate(EngineConfig(**BUILTIN), REPEATING, [GREEDY, SEEDED] * 6 + [GREEDY])
    assert share_equal([one.token_ids for one in mixed], plain) > 0.6


@needs_backend("fa3")
def test_no_row_of_a_verify_graph_sees_another_ones_padding() -> None:
    """Rows of unlike room, as of requests with fewer drafts, in graphs of more tokens and rows."""
    config = EngineConfig(**BUILTIN, **{**DRAFTS, "max_draft_tokens": 7})
    ends = [
        SamplingParams(temperature=0.0, max_tokens=2 + 3 * index, ignore_eos=True)
        for index in range(11)
    ]
    texts = generate(config, REPEATING[:11], ends, rounds=3)
    gaps = gaps_to_likeliest(REPEATING[:11], texts)
    assert gaps.max() < NEAR_TIE
    assert [len(one) for one in texts] == [one.max_tokens for one in ends]
