"""Drafts by an EAGLE-3 head: what it proposes is what the published head would, texts stay, and
folders that are none, or another target's, are refused by name."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.eagle_heads import HeadOracle, change_tensors, save_head
from tests.fakes.tiny_models import NATIVE, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_speculation import assert_same, run
from workers import Engine
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.errors import ConfigError, ModelLoadError
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.paged_drafter_runner import PagedDrafterRunner
from workers.sampling.params import SamplingParams
from workers.speculation.proposer import DraftRows, Drafts

DEEP = TinyModel("qwen3", {**NATIVE["qwen3"].changes, "num_hidden_layers": 4})
DRAFT_IDS = (7, 9, 60)
"""Few, so that many drafts are right where a text has no other tokens."""
ALLOWED = SamplingParams(
    temperature=0.0, max_tokens=20, ignore_eos=True, allowed_token_ids=DRAFT_IDS
)
FIXED: dict[str, Any] = {"draft_policy": "fixed", "max_draft_tokens": 3}
MOST_DRAFTS = (None, 0, 1, None)
"""Of requests, in turn."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A text of which drafts were made, and those."""

    token_ids: list[int]
    drafts: list[int]


class Recorded:
    """A proposer's drafts, beside the texts that they go on from."""

    def __init__(self, runner: PagedDrafterRunner) -> None:
        self.asked: list[Asked] = []
        proposer, history = runner._proposer, runner._runs._history
        own = proposer.propose

        def propose(rows: DraftRows) -> Drafts:
            drafts = own(rows)
            for row, slot in enumerate(rows.slots.tolist()):
                text = history.token_ids[slot, : rows.lens[row]].tolist()
                self.asked.append(
                    Asked(text, drafts.token_ids[row, : drafts.num_drafts[row]].tolist())
                )
            return drafts

        proposer.propose = propose


def made(model: Path | str, head: Path | str, **settings: Any) -> PagedDrafterRunner:
    config = EngineConfig(
        model=str(model),
        device="cpu",
        num_cpu_threads=1,
        **{"speculative": f"eagle3:{head}", **FIXED, **settings},
    )
    return make_model_runner(config, SingleRank(), torch.device("cpu"), lambda done, total: None)


def recorded_run(
    target: Path, head: Path, prompts: Sequence[Sequence[int]], **settings: Any
) -> tuple[list[Asked], EngineStats]:
    """The prompts twice, so that the second time finds them in the cache."""
    runner = made(target, head, **settings)
    return recorded_run_of(runner, target, head, prompts, **settings)


def recorded_run_of(
    runner: PagedDrafterRunner,
    target: Path,
    head: Path,
    prompts: Sequence[Sequence[int]],
    **settings: Any,
) -> tuple[list[Asked], EngineStats]:
    """The same of a runner that was made alike."""
    recorded = Recorded(runner)
    config = EngineConfig(
        model=str(target),
        device="cpu",
        **{"speculative": f"eagle3:{head}", **FIXED, **settings},
    )
    return recorded.asked, run_twice(Engine.of_runner(config, runner), prompts)


def run_twice(engine: Engine, prompts: Sequence[Sequence[int]]) -> EngineStats:
    """So that the second time finds the prompts in the cache; requests that want fewer drafts, or
    none, among them. The engine is closed."""
    collector = ResultCollector()
    try:
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                most = MOST_DRAFTS[(turn + index) % len(MOST_DRAFTS)]
                name = f"{turn}-{index}"
                engine.submit(GenerateRequest(name, prompt, ALLOWED, max_draft_tokens=most))
                collector.expect(name)
            while collector.is_waiting or engine.has_work:
                collector.add(engine.step())
        return engine.stats()
    finally:
        engine.close()


def assert_are_the_heads(asked: Sequence[Asked], head: Path, target: Path) -> None:
    oracle = HeadOracle(head, eager_reference(target))
    assert [one.drafts for one in asked] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(DEEP, tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    return save_head(tmp_path / "head", json.loads((target / "config.json").read_text()), DRAFT_IDS)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4, "num_pages": 26, "max_step_tokens": 24},
        pytest.param({"page_size": 16, "max_step_tokens": 9}, marks=pytest.mark.nightly),
    ],
    ids=["retracted", "chunked"],
)
def test_drafts_are_the_published_heads(target: Path, head: Path, settings: dict[str, Any]) -> None:
    """Over chunks, cached prefixes, retraction, drafts that were right before, and none at all."""
    prompts = [[*range(20, 50), 60 + index] for index in range(4)]
    asked, stats = recorded_run(target, head, prompts, **settings)
    assert_are_the_heads(asked[::3], head, target)
    assert len(asked) > 20
    assert stats.num_accepted_draft_tokens > 10
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0 or "num_pages" not in settings


def test_trees_begin_with_what_the_published_head_takes_for_likeliest(
    target: Path, head: Path
) -> None:
    """As long as states and keys of what held before stand where they should."""
    prompts = [[*range(20, 50), 60 + index] for index in range(3)]
    asked, stats = recorded_run(target, head, prompts, draft_tree=(2, 3, 1), page_size=4)
    oracle = HeadOracle(head, eager_reference(target))
    some = asked[::2]
    assert [one.drafts[:1] for one in some] == [oracle.drafts(one.token_ids, 1) for one in some]
    assert max(len(one.drafts) for one in asked) == 6
    assert stats.accepted_by_position[1] > 2


def test_a_head_may_have_embeddings_and_the_other_repositorys_name(
    target: Path, head: Path
) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    change_tensors(head, embed_tokens__weight=torch.randn(config["vocab_size"], 64))
    asked, _ = recorded_run(target, head, [[30, 31, 32]])
    assert_are_the_heads(asked, head, target)


@pytest.fixture(scope="module")
def builtin_head(plain: list[GenerateResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tokens that are said most, so that some drafts are right."""
    said = Counter(token for result in plain for token in result.token_ids)
    draft_ids = sorted(token for token, _ in said.most_common(8))
    config = json.loads((builtin_model_path() / "config.json").read_text())
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
    return save_head(tmp_path_factory.mktemp("head"), config, draft_ids, **taps)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"page_size": 1, "num_pages": 100, "max_draft_tokens": 3}, marks=pytest.mark.nightly
        ),
        {"page_size": 4, "max_step_tokens": 24, "enable_overlap": False},
        pytest.param({"page_size": 2, "draft_tree": (3, 3, 2)}, marks=pytest.mark.nightly),
    ],
    ids=["retracted", "chunked", "trees"],
)
def test_texts_are_the_same(
    plain: list[GenerateResult], builtin_head: Path, settings: dict[str, Any]
) -> None:
    results, stats = run(speculative=f"eagle3:{builtin_head}", **settings)
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_pages" not in settings


def test_both_memories_are_within_the_bytes_for_them(target: Path, head: Path) -> None:
    kv_cache_bytes = 1 << 20
    runner = made(target, head, kv_cache_bytes=kv_cache_bytes)
    placed = runner._placed
    pools = [runner._backend.token_to_kv_pool.num_bytes, placed.pool.num_bytes]
    assert 0.95 * kv_cache_bytes < sum(pools) + placed.states.nbytes <= kv_cache_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "a target with a vocabulary of 200, not of 131"),
        ({"target_hidden_size": 32}, "a target with a hidden size of 32, not of 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"layers \[3\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}, "3 ascending layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, "2"]}}, "3 ascending layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "3 ascending layers"),
        ({"eagle_config": "x"}, "eagle_config is no object"),
        ({"draft_vocab_size": -1}, "draft_vocab_size=-1 is no part of a vocabulary of 131"),
        ({"draft_vocab_size": 132}, "draft_vocab_size=132 is no part"),
        ({"draft_vocab_size": "3"}, "draft_vocab_size='3' is no part"),
        ({"num_attention_heads": 0}, "config.json cannot be used"),
        ({"intermediate_size": "96"}, "config.json cannot be used"),
        ({"eagle_config": {}}, "a target of 4 has none in the usual places"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is of Qwen3ForCausalLM; EAGLE-3 heads are of"),
        ({"num_hidden_layers": 2}, "has 2 layers, an EAGLE-3 head has one"),
        ({"fc_norm": True}, "heads with fc_norm are not served"),
        ({"intermediate_size": 128}, "gate_proj.weight has shape"),
    ],
)
def test_another_targets_head_is_refused(
    target: Path, head: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        made(target, head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "lacks 1 tensors: fc.weight"),
        ({"norm__bias": torch.zeros(64)}, "no EAGLE-3 head has: norm.bias"),
        ({"d2t": None}, "lacks d2t"),
        ({"t2d": torch.zeros(130, dtype=torch.bool)}, r"t2d has shape \(130,\)"),
        ({"t2d": torch.zeros(131, dtype=torch.bool)}, "d2t and t2d name different tokens"),
    ],
)
def test_tensors_that_are_not_a_heads_are_refused(
    target: Path, head: Path, changes: dict[str, Any], message: str
) -> None:
    change_tensors(head, **changes)
    with pytest.raises(ModelLoadError, match=message):
        made(target, head)


def test_where_there_is_no_head_it_is_refused(target: Path, head: Path) -> None:
    with pytest.raises(
        ModelLoadError, match="neither builtin-head nor a folder with an EAGLE-3 head"
    ):
        made(target, "nowhere")
    with pytest.raises(ConfigError, match="hands over no"):
        made(target, head, model_impl="transformers")
