"""Drafts by a model of their own: texts are the same, memory is shared, misfits are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.fakes.tiny_reference import build_reference, config_of
from tests.unit.workers.engine.test_speculation import assert_same, run
from workers import Engine
from workers.builtin import builtin_draft_path, builtin_model_path
from workers.config import EngineConfig
from workers.engine.results import GenerateResult
from workers.errors import ConfigError, ModelLoadError
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.model_runner import ModelRunner
from workers.runner.paged_drafter_runner import PagedDrafterRunner
from workers.sampling.params import SamplingParams
from workers.speculation.tree_shape import Continuations, GrowingTree

DRAFT = {"speculative": "draft:builtin-draft"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"page_size": 1, "num_pages": 120, "max_draft_tokens": 3}, marks=pytest.mark.nightly
        ),
        {"page_size": 4, "max_step_tokens": 24, "enable_overlap": False},
        {"draft_policy": "adaptive", "max_running_requests": 5},
        {"draft_tree": (3, 4, 2), "page_size": 1, "num_pages": 75},
    ],
    ids=["retracted", "chunked", "adaptive", "trees_retracted"],
)
def test_texts_are_the_same(plain: list[GenerateResult], settings: dict[str, Any]) -> None:
    results, stats = run(**DRAFT, **settings)
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_pages" not in settings


PREFIX = [*range(40, 75)]
PROMPTS = [[*PREFIX, 90 + index] for index in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def test_a_draft_that_is_the_target_is_always_right() -> None:
    """Over prompts that find their beginning in the cache, whose keys the draft has, too, over
    retraction, and over steps that have no drafts between such that have."""
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        speculative="draft:builtin",
        draft_policy="fixed",
        max_draft_tokens=3,
        page_size=4,
        num_pages=34,
        max_step_tokens=40,
    )
    check_always_right(Engine.from_config(config))


def check_always_right(engine: Engine) -> None:
    """Of an engine whose draft model is its target. It is closed."""
    try:
        for _ in range(2):
            engine.generate(PROMPTS, GREEDY)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.num_preemptions > 0
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 3 * 24


def likeliest_last(tree: GrowingTree, found: Continuations) -> npt.NDArray[np.int64]:
    """The same level as grow's, with what is often right behind what seldom is."""
    best = np.argsort(-found.logprobs, kind="stable")[: tree.widths[tree.num_levels]][::-1]
    tree.newest = range(tree.newest.stop, tree.newest.stop + len(best))
    tree.token_ids += found.token_ids[best].tolist()
    tree.parents += found.parents[best].tolist()
    tree.logprobs += found.logprobs[best].tolist()
    tree.num_levels += 1
    return best


def test_where_a_draft_stands_in_its_tree_is_nothing_to_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were the draft's keys not moved with the target's, later drafts would be right less often."""
    told = []
    for grow in (GrowingTree.grow, likeliest_last):
        monkeypatch.setattr(GrowingTree, "grow", grow)
        settings = {"draft_policy": "fixed", "draft_tree": (3, 3, 2), "num_cpu_threads": 1}
        engine = Engine.from_config(EngineConfig(device="cpu", **settings, **DRAFT))
        try:
            results = engine.generate(PROMPTS[:3], GREEDY)
            told.append(([one.token_ids for one in results], engine.stats().accepted_by_position))
        finally:
            engine.close()
    assert told[0] == told[1]
    assert told[0][1][1] > 4


def made(**settings: Any) -> ModelRunner:
    config = EngineConfig(device="cpu", num_cpu_threads=1, **settings)
    return make_model_runner(config, SingleRank(), torch.device("cpu"), lambda done, total: None)


def bytes_of(pool: Any, num_layers: int) -> int:
    buffers = [pool.get_kv_buffer(layer) for layer in range(num_layers)]
    return sum(k.nbytes + v.nbytes for k, v in buffers)


def test_both_models_keys_and_values_are_within_the_bytes_for_them() -> None:
    kv_cache_bytes = 8 << 20
    alone = made(kv_cache_bytes=kv_cache_bytes)
    runner = made(kv_cache_bytes=kv_cache_bytes, **DRAFT)
    assert isinstance(runner, PagedDrafterRunner)
    assert runner.num_pages < alone.num_pages
    layers = json.loads((builtin_draft_path() / "config.json").read_text())["num_hidden_layers"]
    own_layers = json.loads((builtin_model_path() / "config.json").read_text())["num_hidden_layers"]
    drafts = bytes_of(runner._placed.pool, layers)
    whole = drafts + bytes_of(runner._backend.token_to_kv_pool, own_layers)
    assert drafts > 0
    assert 0.98 * kv_cache_bytes < whole <= kv_cache_bytes


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(builtin_draft_path(), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="of which not all are alike"):
        made(speculative=f"draft:{other}")
    small = tmp_path / "small"
    build_reference(config_of("llama", "LlamaForCausalLM", {}), "LlamaForCausalLM", small)
    with pytest.raises(ConfigError, match=r"different vocabularies: \d+ and 4096 tokens"):
        made(speculative=f"draft:{small}", max_context_len=64)


def test_a_draft_model_that_keeps_states_or_does_not_reach_as_far_is_refused(
    tmp_path: Path,
) -> None:
    build_reference(config_of("mamba2", "Mamba2ForCausalLM", {}), "Mamba2ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="Mamba2ForCausalLM cannot be a draft model"):
        made(speculative=f"draft:{tmp_path}", max_context_len=64)
    short = tmp_path / "short"
    shutil.copytree(builtin_draft_path(), short)
    facts = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match=r"the draft model .*short: max_context_len=\d+ exceeds"):
        made(speculative=f"draft:{short}")


def test_trees_are_refused_of_models_whose_layers_are_not_alike(tmp_path: Path) -> None:
    """Of the one that drafts as well: what it keeps of a path has to be brought in line, too."""
    unlike = {"layer_types": ["full_attention"] * 4}
    for model_type, class_name, changes in (
        ("llama", "LlamaForCausalLM", {}),
        ("gemma3n_text", "Gemma3nForCausalLM", unlike),
    ):
        folder = tmp_path / model_type
        build_reference(config_of(model_type, class_name, changes), class_name, folder)
        shutil.copy(builtin_draft_path() / "tokenizer.json", folder)
    alike, shared = str(tmp_path / "llama"), str(tmp_path / "gemma3n_text")
    for model, speculative in ((shared, "suffix"), (alike, f"draft:{shared}")):
        with pytest.raises(ConfigError, match=r"Gemma3n.* alike in all layers; leave draft_tree"):
            made(model=model, speculative=speculative, draft_tree=(2, 2), max_context_len=64)
    made(model=alike, speculative=f"draft:{shared}", max_context_len=64)


def test_a_draft_model_is_refused_where_there_is_none() -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        made(speculative="draft:nowhere")
