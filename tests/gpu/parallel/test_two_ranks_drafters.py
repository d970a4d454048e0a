"""Drafts by a model or a head over two ranks on GPUs, each with its part of the drafter: the same
on both to the token, over graphs too; texts are those without drafts."""

import pytest

from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import (
    BUILTIN,
    GREEDY,
    PROMPTS,
    SEEDED,
    alone,
    assert_likeliest,
)
from tests.gpu.parallel.draft_record import drafts_of_ranks
from tests.gpu.parallel.drafters import (
    ALLOWED,
    FEW,
    FIXED,
    FLOAT32,
    HEADS,
    SEEDED_ALLOWED,
    SHARED,
    made_in,
    share_right,
)
from tests.gpu.parallel.running_engine import running

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS]

BOTH_WAYS = pytest.mark.parametrize("has_peer_memory", [True, False], ids=["peer", "nccl"])


@BOTH_WAYS
def test_float32_text_with_drafts_of_a_model_equals_that_of_one_rank(
    has_peer_memory, tmp_path
) -> None:
    """Greedy and drawn; few pages, so that requests are retracted and found in the cache again."""
    config = {**BUILTIN, **FLOAT32, "num_pages": 300}
    drafts = {**FIXED, "speculative": "draft:builtin-draft", "enable_peer_memory": has_peer_memory}
    sampling = [GREEDY, SEEDED] * 5
    with running({**config, **drafts}, drafts_folder=tmp_path) as engine:
        (together,) = engine.generate(PROMPTS[:10], sampling)
        counts = engine.counts()
        engine.end()
        drafts_of_ranks(tmp_path, 2)
    assert together == alone(config, PROMPTS[:10], sampling)
    assert 0 < counts["right"] < counts["drafts"]


@NEEDS_FA3
@BOTH_WAYS
def test_a_draft_that_is_the_target_is_nearly_always_right_over_graphs(
    has_peer_memory, tmp_path
) -> None:
    drafts = {**FIXED, "speculative": "draft:builtin", "enable_peer_memory": has_peer_memory}
    with running({**BUILTIN, **drafts}, drafts_folder=tmp_path) as engine:
        rounds = engine.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, captures=True)
        counts = engine.counts()
        engine.end()
        told = drafts_of_ranks(tmp_path, 2)
    assert told.is_captured
    assert told.num_replays > 3
    assert counts["right"] > 0.9 * counts["drafts"] > 0
    assert_likeliest(rounds)


@NEEDS_FA3
@BOTH_WAYS
@pytest.mark.parametrize("captures", [False, True], ids=["capturing", "captured"])
@pytest.mark.parametrize("speculative", ["draft:builtin-draft", "eagle3:builtin-head"])
def test_bfloat16_drafts_keep_to_the_likeliest_tokens_over_graphs(
    speculative, captures, has_peer_memory, tmp_path
) -> None:
    """captures: all graphs before the first request, or while requests are served."""
    drafts = {**FIXED, "enable_peer_memory": has_peer_memory, "speculative": speculative}
    with running({**BUILTIN, **drafts}, drafts_folder=tmp_path) as engine:
        rounds = engine.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, captures)
        engine.generate(PROMPTS, [SEEDED] * len(PROMPTS))
        counts = engine.counts()
        engine.end()
        told = drafts_of_ranks(tmp_path, 2)
    assert_likeliest(rounds)
    assert 0 < counts["right"] < counts["drafts"]
    assert told.num_replays > 3
    assert told.is_captured >= captures


@NEEDS_FA3
def test_drafts_by_rounded_weights_keep_to_the_likeliest_tokens_over_graphs(tmp_path) -> None:
    """Of each rank's part of a head: sums of parts are added up before ranks'."""
    rounded = {"speculative": "eagle3:builtin-head", "draft_quantization": "fp8"}
    with running({**BUILTIN, **FIXED, **rounded}, drafts_folder=tmp_path) as engine:
        rounds = engine.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, True)
        counts = engine.counts()
        engine.end()
        told = drafts_of_ranks(tmp_path, 2)
    assert_likeliest(rounds)
    assert 0 < counts["right"] < counts["drafts"]
    assert told.num_replays > 3
    assert told.is_captured


@pytest.mark.parametrize("name", HEADS)
def test_float32_texts_and_drafts_of_heads_are_those_of_one_rank_and_the_published_ones(
    name, tmp_path
) -> None:
    target, speculative, oracle = HEADS[name](tmp_path)
    config = {"model": str(target), "model_impl": "native", **FLOAT32, **FEW}
    sampling, folder = [ALLOWED, SEEDED_ALLOWED] * 2, made_in(tmp_path / "drafts")
    drafts = {**FIXED, "speculative": speculative}
    with running({**config, **drafts}, drafts_folder=folder) as engine:
        rounds = engine.generate(SHARED, sampling, 2)
        engine.end()
        told = drafts_of_ranks(folder, 2)
    expected = alone(config, SHARED, sampling)
    assert rounds == [expected, expected]
    assert share_right(told, oracle) == 1.0


@NEEDS_FA3
@BOTH_WAYS
@pytest.mark.parametrize("name", ["eagle", "mixture"])
def test_bfloat16_drafts_of_heads_are_the_published_ones_over_graphs(
    name, has_peer_memory, tmp_path
) -> None:
    """Of few tokens that may be said; near ties may turn."""
    target, speculative, oracle = HEADS[name](tmp_path)
    config = {"model": str(target), "dtype": "bfloat16", **FEW}
    drafts = {**FIXED, "speculative": speculative, "enable_peer_memory": has_peer_memory}
    folder = made_in(tmp_path / "drafts")
    with running({**config, **drafts}, drafts_folder=folder) as engine:
        engine.generate(SHARED, [ALLOWED] * 4, 2, captures=True)
        counts = engine.counts()
        engine.end()
        told = drafts_of_ranks(folder, 2)
    assert told.num_replays > 3
    assert share_right(told, oracle) >= 0.8
    assert counts["drafts"] > counts["right"] > 5
