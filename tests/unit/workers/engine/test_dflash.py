"""Drafts by a DFlash block drafter: what it proposes is what the published layout says, texts stay,
and folders that are none, another target's or another kind's are refused by name."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.dflash_drafters import BLOCK_SIZE, DFlashOracle, save_drafter
from tests.fakes.eagle_heads import change_tensors
from tests.fakes.tiny_models import NATIVE, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_eagle import DRAFT_IDS, Asked, made, recorded_run_of
from tests.unit.workers.engine.test_speculation import assert_same, run
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats
from workers.engine.results import GenerateResult
from workers.errors import ConfigError, ModelLoadError
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

UNTIED = {"num_hidden_layers": 4, "tie_word_embeddings": False}
DEEP = TinyModel("qwen3", {**NATIVE["qwen3"].changes, **UNTIED})
DEEP_LLAMA = TinyModel("llama", {**NATIVE["llama3"].changes, **UNTIED})


def save_target(tiny: TinyModel, folder: Path) -> Path:
    """Of most tokens it thinks nothing, so that the drafter that borrows its head proposes what
    may be right where a text has no others."""
    save_tiny_model(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    head = torch.zeros_like(tensors["lm_head.weight"])
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(len(DRAFT_IDS), head.shape[1], generator=generator)
    # Of these it always takes one for likelier than any other.
    head[list(DRAFT_IDS)] = rows - rows.mean(0)
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(DEEP, tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return save_drafter(tmp_path / "drafter", config_of(target))


def recorded(
    target: Path, drafter: Path, prompts: Sequence[Sequence[int]], **settings: Any
) -> tuple[list[Asked], EngineStats]:
    """Checked against the oracle: final states of all blocks, and the drafts."""
    settings["speculative"] = f"dflash:{drafter}"
    runner, states = made(target, drafter, **settings), list[torch.Tensor]()
    runner._placed.drafter.register_forward_hook(lambda module, args, made: states.append(made))
    asked, stats = recorded_run_of(runner, target, drafter, prompts, **settings)
    oracle = DFlashOracle(drafter, eager_reference(target))
    expected = torch.cat([oracle.states(one.token_ids, len(one.drafts)) for one in asked])
    torch.testing.assert_close(torch.cat(states), expected, atol=1e-3, rtol=1e-3)
    assert [one.drafts for one in asked] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked
    ]
    return asked, stats


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4, "num_pages": 26, "max_step_tokens": 24},
        {"page_size": 1, "max_step_tokens": 40},
        pytest.param(
            {"page_size": 16, "max_step_tokens": 9, "max_draft_tokens": BLOCK_SIZE - 1},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["retracted", "page_1", "chunked_whole_blocks"],
)
def test_drafts_are_those_of_the_published_layout(
    target: Path, drafter: Path, settings: dict[str, Any]
) -> None:
    """Over chunks, cached prefixes, retraction, right and wrong drafts before, and blocks of
    several lengths beside each other."""
    prompts = [[*range(20, 50), 60 + index] for index in range(4)]
    asked, stats = recorded(target, drafter, prompts, **settings)
    assert len(asked) > 20
    assert len({tuple(one.drafts) for one in asked}) > 4
    assert stats.num_accepted_draft_tokens > 10
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0 or "num_pages" not in settings


def test_a_drafter_may_have_biases_and_a_target_of_another_family(tmp_path: Path) -> None:
    """block_size in dflash_config counts before the one beside it."""
    target = save_target(DEEP_LLAMA, tmp_path / "target")
    section = {"mask_token_id": 9, "target_layer_ids": [1], "block_size": 5, "causal": False}
    drafter = save_drafter(
        tmp_path / "drafter",
        config_of(target),
        attention_bias=True,
        block_size=2,
        dflash_config=section,
    )
    asked, _ = recorded(target, drafter, [[30, 31, 32], [33, 34]], max_draft_tokens=4)
    assert max(len(one.drafts) for one in asked) == 4


@pytest.fixture(scope="module")
def builtin_drafter(plain: list[GenerateResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers change little, so that it often proposes what the target's head makes of the mask,
    here a token that is said a lot."""
    said = Counter(token for result in plain for token in result.token_ids)
    weights = load_file(builtin_model_path() / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    head = weights.get("lm_head.weight", embedding).float()
    of_masks = (embedding @ head.T).argmax(-1).tolist()
    mask = max(range(len(of_masks)), key=lambda token: said[of_masks[token]])
    section = {"mask_token_id": mask, "target_layer_ids": [1, 3, 5]}
    config = config_of(builtin_model_path())
    folder = save_drafter(tmp_path_factory.mktemp("drafter"), config, dflash_config=section)
    tensors = load_file(folder / "model.safetensors")
    ends = ("o_proj.weight", "down_proj.weight")
    tensors |= {name: one * 0.003 for name, one in tensors.items() if name.endswith(ends)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "num_pages": 100, "max_draft_tokens": BLOCK_SIZE - 1},
        pytest.param(
            {"page_size": 4, "max_step_tokens": 24, "enable_overlap": False},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"page_size": 16, "draft_policy": "adaptive", "max_running_requests": 3},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["retracted", "chunked", "adaptive"],
)
def test_texts_are_the_same(
    plain: list[GenerateResult], builtin_drafter: Path, settings: dict[str, Any]
) -> None:
    """Greedy ones and those with seeds, penalties and stop tokens, in mixed batches."""
    results, stats = run(speculative=f"dflash:{builtin_drafter}", **settings)
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_pages" not in settings


def test_both_memories_are_within_the_bytes_for_them(target: Path, drafter: Path) -> None:
    kv_cache_bytes = 1 << 20
    runner = made(target, drafter, kv_cache_bytes=kv_cache_bytes, speculative=f"dflash:{drafter}")
    own = runner._backend.token_to_kv_pool.num_bytes
    assert 0.95 * kv_cache_bytes < own + runner._placed.pool.num_bytes <= kv_cache_bytes


SECTION = {"mask_token_id": 3, "target_layer_ids": [0, 2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "a target with a vocabulary of 200, not of 131"),
        ({"hidden_size": 32}, "a target with a hidden size of 32, not of 64"),
        ({"num_target_layers": 36}, "a target of 36 layers, not of 4"),
        ({"architectures": ["DFlash2DraftModel"]}, "is of DFlash2DraftModel; DFlash drafters are"),
        ({"model_type": "llama"}, "layers of 'llama'; DFlash drafters have those of 'qwen3'"),
        ({"dflash_config": "x"}, "dflash_config is no object"),
        ({"dflash_config": {}}, "mask_token_id is an integer in .0, 131., not None"),
        ({"dflash_config": {**SECTION, "mask_token_id": 131}}, "mask_token_id is an integer in"),
        ({"dflash_config": {**SECTION, "mask_token_id": True}}, "not True"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids are ascending layers, not No"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [2, 0]}}, "are ascending layers"),
        ({"dflash_config": {**SECTION, "target_layer_ids": []}}, "are ascending layers"),
        ({"dflash_config": {**SECTION, "target_layer_ids": ["0"]}}, "are ascending layers"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [0, 3]}}, r"layers \[3\] are not in"),
        ({"block_size": None}, r"block_size is an integer in \[2, .*, not None"),
        ({"block_size": 1}, r"block_size is an integer in \[2, .*, not 1$"),
        ({"block_size": 10**30}, r"block_size is an integer in \[2, .*, not 10{30}$"),
        ({"block_size": 3}, "max_draft_tokens=3: a block of .* has 3 tokens, 2 of them drafts"),
        ({"dflash_config": {**SECTION, "causal": True}}, "drafters with causal=True are not"),
        ({"dflash_config": {**SECTION, "new_key": 2}}, "drafters with new_key=2 are not served"),
        ({"dflash_config": {**SECTION, "output_multiplier": 0.2}}, "output_multiplier=0.2"),
        ({"is_causal": True}, "drafters with is_causal=True are not served"),
        ({"markov_rank": 256}, "drafters with markov_rank=256 are not served"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0 are not served"),
        ({"target_hidden_size": 32}, "target_hidden_size=32 are not served"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32},
            r"layers of \['sliding_attention'\] are not served",
        ),
        ({"use_sliding_window": True}, "use_sliding_window=True are not served"),
        ({"intermediate_size": 128}, "gate_proj.weight has shape"),
        ({"intermediate_size": "96"}, "config.json cannot be used"),
    ],
)
def test_what_is_not_the_targets_drafter_is_refused(
    target: Path, drafter: Path, changes: dict[str, Any], message: str
) -> None:
    (drafter / "config.json").write_text(json.dumps({**config_of(drafter), **changes}))
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        made(target, drafter, speculative=f"dflash:{drafter}")


def test_what_changes_nothing_is_no_other_drafter(target: Path, drafter: Path) -> None:
    section = {**SECTION, "mask_token": "<|MASK|>", "use_swa": False, "output_multiplier": 1.0}
    changes = {"is_causal": False, "target_hidden_size": 64, "dflash_config": section}
    (drafter / "config.json").write_text(json.dumps({**config_of(drafter), **changes}))
    assert recorded(target, drafter, [[30, 31, 32]])[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "lacks 1 tensors: fc.weight"),
        ({"layers__1__self_attn__q_norm__weight": None}, "lacks 1 tensors: layers.1.self_attn.q_"),
        ({"lm_head__weight": torch.zeros(131, 64)}, "no DFlash drafter has: lm_head.weight"),
    ],
)
def test_tensors_that_are_not_a_drafters_are_refused(
    target: Path, drafter: Path, changes: dict[str, Any], message: str
) -> None:
    change_tensors(drafter, **changes)
    with pytest.raises(ModelLoadError, match=message):
        made(target, drafter, speculative=f"dflash:{drafter}")


def test_where_it_cannot_run_it_is_refused(target: Path, drafter: Path) -> None:
    method = f"dflash:{drafter}"
    with pytest.raises(ModelLoadError, match="no folder with a DFlash drafter"):
        made(target, "", speculative="dflash:nowhere")
    with pytest.raises(ConfigError, match="hands over no"):
        made(target, "", speculative=method, model_impl="transformers")
    with pytest.raises(ConfigError, match="dflash proposes chains, trees do"):
        EngineConfig(speculative=method, draft_tree=(2, 2))
    config = EngineConfig(model=str(target), speculative=method)
    with pytest.raises(ConfigError, match="dflash runs on CPU only so far"):
        make_model_runner(config, SingleRank(), torch.device("cuda"), lambda done, total: None)


def test_dummy_weights_need_no_tensors(target: Path, drafter: Path) -> None:
    (drafter / "model.safetensors").unlink()
    loaded = made(target, "", speculative=f"dflash:{drafter}", load_format="dummy")
    assert loaded._drafter.num_taps == 2
