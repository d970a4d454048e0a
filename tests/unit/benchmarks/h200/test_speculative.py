"""Pretended acceptance: as many tokens a step as asked for, of chains and trees that ranks make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.h200.pretended_runs import (
    ChanceDraw,
    EvenDraw,
    PretendedRuns,
    PretendingTrees,
    RunDraw,
    chance_of,
    pretend,
)
from benchmarks.h200.speculative import build, kinds_of, measure, model_folders, parse_arguments
from tests.fakes.rank_drafts import EagerTreeRank, ReplayingRank, ReplayingTreeRank
from workers import Engine
from workers.config import EngineConfig
from workers.loading.eagle_head import read_head_config
from workers.sampling.params import SamplingParams
from workers.scheduler.plan_tree import PlanTrees

MODELS = Path("benchmarks/h200/models").resolve()
RankClass = type[EagerTreeRank] | type[ReplayingRank]


@pytest.mark.parametrize("tokens_a_step", [1.0, 2.4, 3.0, 4.0])
def test_draws_bring_as_many_tokens_as_asked_for(tokens_a_step: float) -> None:
    most = np.full(200, 5, dtype=np.int32)
    for draw in (EvenDraw(tokens_a_step), ChanceDraw(chance_of(tokens_a_step, 4))):
        rng = np.random.default_rng(0)
        lens = np.concatenate([draw.run_lens(rng, most) for _ in range(50)])
        assert lens.mean() == pytest.approx(tokens_a_step, abs=0.06)
        assert lens.min() >= 1
        assert lens.max() <= 5
    even = EvenDraw(tokens_a_step).run_lens(np.random.default_rng(0), most)
    assert set(even.tolist()) <= {int(tokens_a_step), int(tokens_a_step) + 1}


@pytest.mark.parametrize(
    ("draw", "expected"),
    [(EvenDraw(2.5), [1.0, 2.0, 2.5]), (ChanceDraw(0.5), [1.0, 1.5, 1.96875])],
)
def test_draws_stay_within_what_a_row_has(draw: RunDraw, expected: list[float]) -> None:
    most = np.array([1, 2, 6] * 50, dtype=np.int32)
    lens = draw.run_lens(np.random.default_rng(0), most)
    assert draw.expected_lens(most)[:3].tolist() == pytest.approx(expected)
    assert set(lens[::3].tolist()) == {1}
    assert set(lens[1::3].tolist()) <= {1, 2}
    assert lens[2::3].max() > 2


def test_the_path_to_a_draft_of_the_drawn_depth_holds() -> None:
    """Of a tree of two and two drafts behind the first of these, and of a row of two in a chain."""
    parents = np.array([-1, 0, 0, 1, 1, -1, 0, 1], dtype=np.int32)
    num_samples = np.array([5, 3], dtype=np.int32)
    trees = PlanTrees.of_samples(parents, num_samples)
    runs = PretendedRuns()
    runs.draw = EvenDraw(3.0)
    tokens = torch.zeros(8, dtype=torch.int64)
    seen = set()
    for _ in range(40):
        run_lens, order = PretendingTrees(runs).accept(tokens, tokens + 1, num_samples, trees)
        assert run_lens.tolist() == [3, 3]
        assert order[:2].tolist() == [0, 1]
        assert order[5:].tolist() == [5, 6, 7]
        assert sorted(order.tolist()) == list(range(8))
        seen.add(int(order[2]))
    assert seen == {3, 4}
    assert runs.held.num_tokens == 3 * runs.held.num_rows == 240


def rank_engine(rank_class: RankClass, **settings: Any) -> Engine:
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        speculative="eagle3:builtin-head",
        draft_policy="fixed",
        enable_prefix_cache=False,
        check_integrity_when_idle=True,
        **settings,
    )
    return rank_class(config).engine()


@pytest.mark.parametrize(
    ("rank_class", "settings"),
    [
        (ReplayingRank, {"max_draft_tokens": 3, "page_size": 1}),
        (ReplayingTreeRank, {"draft_tree": (4, 4, 4, 4), "page_size": 1}),
        (EagerTreeRank, {"draft_tree": (2, 3, 1)}),
    ],
    ids=["chain", "tree", "tree_pass_by_pass"],
)
def test_ranks_that_make_drafts_commit_what_is_drawn(
    rank_class: RankClass, settings: dict[str, Any]
) -> None:
    engine, runs = rank_engine(rank_class, **settings), PretendedRuns()
    pretend(engine, runs)
    runs.draw = EvenDraw(3.0)
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=91, ignore_eos=True)] * 3
        results = engine.generate([[5, 6, 7], [8, 9], [10, 11, 12, 13]], params)
        stats = engine.stats()
    finally:
        engine.close()
    assert [len(one.token_ids) for one in results] == [91] * 3
    # Of the last runs fewer are of any use.
    assert 2.9 < runs.held.num_tokens / runs.held.num_rows <= 3.0
    assert stats.num_accepted_draft_tokens == runs.held.num_tokens - runs.held.num_rows


def test_an_engine_whose_device_verifies_is_refused() -> None:
    engine = Engine.from_config(
        EngineConfig(device="cpu", num_cpu_threads=1, speculative="eagle3:builtin-head")
    )
    try:
        with pytest.raises(RuntimeError, match="where the host tells what holds"):
            pretend(engine, PretendedRuns())
    finally:
        engine.close()


def test_kinds_are_those_asked_for() -> None:
    config, head = str(MODELS / "llama-3.1-8b.json"), str(MODELS / "llama-3.1-8b-eagle3.json")
    names = [kind.name for kind in kinds_of(parse_arguments([config]), "ngram")]
    assert names == ["plain", "chain of 3", "chain of 5"]
    by_chance = parse_arguments([config, "--draw", "chance"])
    assert [kind.name for kind in kinds_of(by_chance, "ngram")] == [*names, "adaptive"]
    asked = [config, "--head", head, "--kinds", "trees", "chains", "--chains", "4"]
    chain, tree = kinds_of(parse_arguments(asked), "eagle3:X")
    assert chain.settings == {
        "speculative": "eagle3:X",
        "draft_quantization": None,
        "draft_policy": "fixed",
        "max_draft_tokens": 4,
    }
    rounded = parse_arguments([*asked, "--draft-quantization", "fp8"])
    for kind in kinds_of(rounded, "eagle3:X"):
        assert kind.settings["draft_quantization"] == "fp8"
    assert (tree.name, tree.num_drafts) == ("tree of 4+4+4+4", 16)


def test_lengths_chosen_as_they_pay_are_drawn_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["config.json", "--kinds", "adaptive"])
    assert "--draw chance" in capsys.readouterr().err


def test_what_is_a_heads_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    rounded = ["--draft-quantization", "fp8"]
    for asked in (["--tree", "4", "4"], ["--kinds", "plain", "trees"], rounded):
        with pytest.raises(SystemExit):
            parse_arguments(["config.json", *asked])
        assert "--head" in capsys.readouterr().err


def test_the_head_is_of_the_published_size() -> None:
    """hidden 4096, intermediate 14336, 32 and 8 heads, 32,000 tokens, for the model's 32 layers."""
    config, head = str(MODELS / "llama-3.1-8b.json"), str(MODELS / "llama-3.1-8b-eagle3.json")
    with model_folders(parse_arguments([config, "--head", head])) as (model, speculative):
        assert json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"] == 32
        read = read_head_config(Path(speculative.removeprefix("eagle3:")), 32)
    assert read.tap_layers == (1, 15, 28)
    assert read.spec.draft_vocab_size == 32_000
    assert read.spec.layer.vocab_size == 128_256
    assert read.spec.target_hidden_size == read.spec.layer.hidden_size == 4096


def test_plain_decoding_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.h200.drafted_decode.VOCAB_SIZE", 500)
    config = tmp_path / "tiny.json"
    target = json.loads((Path("workers/builtin/target/config.json")).read_text())
    config.write_text(json.dumps({**target, "max_position_embeddings": 8192}))
    asked = [str(config), "--kinds", "plain", "--streams", "2", "--tokens", "6", "--repeats", "1"]
    arguments = parse_arguments(asked)
    with model_folders(arguments) as (folder, speculative):
        (plain,) = kinds_of(arguments, speculative)
        engine = build(folder, 1, plain)
        try:
            (row,) = measure(engine, plain, arguments)
        finally:
            engine.close()
    assert (row["drafts"], row["streams"], row["acceptance"]) == ("plain", 2, None)
    # A difference of two times, which a busy machine may make negative.
    assert row["all_ms"] == [row["ms_a_token"]]
    assert row["tokens_a_step"] is None
