"""Drafts by weights that are rounded to FP8 while they are loaded: those of the rounded weights, in
texts that stay; what has no weights of its own to round is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.rank_drafts import EagerRank
from tests.fakes.tiny_models import eager_reference, save_tiny_model
from tests.unit.workers.engine.test_eagle import (
    DEEP,
    DRAFT_IDS,
    assert_are_the_heads,
    made,
    recorded_run,
)
from tests.unit.workers.engine.test_rank_drafts import FEW_PAGES
from tests.unit.workers.engine.test_rank_drafts import recorded_run as recorded_run_of_ranks
from tests.unit.workers.engine.test_speculation import assert_same, run
from tests.unit.workers.engine.test_two_ranks_drafts import MadeDrafts, two_ranks
from workers.builtin import builtin_draft_path, builtin_model_path
from workers.config import EngineConfig
from workers.engine.results import GenerateResult
from workers.errors import ConfigError
from workers.layers.embedding import FormattedLMHead
from workers.loading import rounded_drafter
from workers.loading.kept_formats import keeps_formats
from workers.models.eagle_head import EagleHead
from workers.parallel.group import SingleRank
from workers.runner.draft_model import PlacedModel
from workers.runner.factory import make_model_runner
from workers.runner.head_drafter import PlacedHead

FP8 = torch.float8_e4m3fn
ROUNDED: dict[str, Any] = {"draft_quantization": "fp8"}
CUT = {"num_pages": 26, "page_size": 4, "max_step_tokens": 24}


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """What a scale a row leaves of a matrix."""
    scales = matrix.float().abs().amax(1, keepdim=True) / 448.0
    return (matrix.float() / scales).to(FP8).float() * scales


def rounded_head(head: Path, folder: Path) -> Path:
    """The same with its linear layers' weights as they are rounded."""
    folder.mkdir()
    (folder / "config.json").write_text((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    linear = {name for name, one in tensors.items() if one.dim() == 2 and "embed" not in name}
    save_file(
        {name: rounded(one) if name in linear else one for name, one in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(DEEP, tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    return save_head(tmp_path / "head", json.loads((target / "config.json").read_text()), DRAFT_IDS)


def test_drafts_are_those_of_the_rounded_weights(target: Path, head: Path, tmp_path: Path) -> None:
    """Over chunks, cached prefixes and retraction; those of the checkpoint's own are others."""
    prompts = [[*range(20, 50), 60 + index] for index in range(4)]
    asked, stats = recorded_run(target, head, prompts, **CUT, **ROUNDED)
    assert_are_the_heads(asked[::3], rounded_head(head, tmp_path / "rounded"), target)
    assert stats.num_accepted_draft_tokens > 10
    with pytest.raises(AssertionError):
        assert_are_the_heads(asked, head, target)


def test_two_ranks_make_the_drafts_of_the_rounded_weights(
    target: Path, head: Path, tmp_path: Path
) -> None:
    """Of three tokens one rank has two and the other one."""
    oracle = HeadOracle(rounded_head(head, tmp_path / "rounded"), eager_reference(target))
    settings = {"model": str(target), "speculative": f"eagle3:{head}", **FEW_PAGES, **ROUNDED}
    with two_ranks(EagerRank, **settings) as (engine, ranks):
        made_drafts = MadeDrafts(ranks)
        asked, _ = recorded_run_of_ranks(ranks[0], engine)
    made_drafts.check()
    assert [one.drafts for one in asked[::3]] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked[::3]
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": "eagle3:builtin-head", "page_size": 4, "max_step_tokens": 24},
        {"speculative": "eagle3:builtin-head", "draft_tree": (3, 3, 2), "page_size": 2},
        {"speculative": "draft:builtin-draft", "page_size": 1, "num_pages": 120},
    ],
    ids=["head", "head_tree", "model"],
)
def test_texts_are_the_same(plain: list[GenerateResult], settings: dict[str, Any]) -> None:
    results, stats = run(**settings, **ROUNDED)
    assert_same(results, plain)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_a_draft_model_is_rounded_and_its_target_is_not() -> None:
    runner = made("builtin", "", speculative="draft:builtin-draft", **ROUNDED)
    placed = runner._placed
    assert isinstance(placed, PlacedModel)
    layer = "model.layers.0.mlp.down_proj.weight"
    draft = load_file(builtin_draft_path() / "model.safetensors")[layer]
    own = load_file(builtin_model_path() / "model.safetensors")[layer]
    assert torch.equal(placed.model.get_parameter(layer), rounded(draft))
    assert torch.equal(runner._model.get_parameter(layer), own.float())


def is_on_hopper(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    return keeps_formats(config, dtype, (9, 0))


def placed_head(target: Path, head: Path, **settings: Any) -> EagleHead:
    """Of 16 bits."""
    placed = made(target, head, dtype="bfloat16", **settings)._placed
    assert isinstance(placed, PlacedHead)
    assert isinstance(placed.head, EagleHead)
    return placed.head


def num_bytes(head: EagleHead) -> int:
    return sum(one.nbytes for one in (*head.parameters(), *head.buffers()))


@pytest.mark.parametrize("draft_ids", [range(5, 37), range(5, 25)], ids=["all", "but_its_logits"])
def test_a_head_keeps_half_the_bytes_where_products_take_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_ids: range
) -> None:
    """Of 20 tokens no product is made in whole tiles: these are a matrix."""
    pytest.importorskip("triton", reason="comes with torch for CUDA only")
    own = json.loads((target / "config.json").read_text())
    folder = save_head(tmp_path / "head", own, [*draft_ids])
    stored = load_file(rounded_head(folder, tmp_path / "rounded") / "model.safetensors")
    plain = placed_head(target, folder)
    monkeypatch.setattr(rounded_drafter, "keeps_formats_on", is_on_hopper)
    kept = placed_head(target, folder, **ROUNDED)
    layers = {name: one for name, one in kept.named_modules() if one in kept.layers_as_stored()}
    assert len(layers) == 6
    saved = 0
    for name, layer in layers.items():
        if isinstance(layer, FormattedLMHead) and len(draft_ids) % 16:
            assert torch.equal(layer.weight, stored["lm_head.weight"].bfloat16())
            continue
        assert layer.is_kept, name
        rows, columns = layer.kept.values.shape
        saved += rows * columns - 4 * rows
    assert num_bytes(plain) - num_bytes(kept) == saved > 0.9 * num_bytes_of_matrices(plain) / 2
    of_fc = layers["fc"].kept.dequantised()
    assert torch.equal(of_fc, rounded(load_file(folder / "model.safetensors")["fc.weight"]))


def num_bytes_of_matrices(head: EagleHead) -> int:
    return sum(layer.weight.nbytes for layer in head.layers_as_stored())


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (None, "nobody who proposes drafts"),
        ("ngram", "ngram runs no model"),
        ("suffix", "suffix runs no model"),
        ("mtp", "mtp is a layer of the model's own checkpoint"),
        ("dflash:somewhere", "dflash runs on CPU only"),
    ],
)
def test_what_has_no_weights_of_its_own_to_round_is_refused(
    speculative: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"draft_quantization='fp8'.*{message}"):
        EngineConfig(speculative=speculative, **ROUNDED)


def test_a_format_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_quantization='int3' is not known, but fp8"):
        EngineConfig(speculative="eagle3:somewhere", draft_quantization="int3")  # type: ignore[arg-type]


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    recipe = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps({**config, **recipe}))


def test_a_quantised_head_is_refused(target: Path, head: Path) -> None:
    quantise(head)
    with pytest.raises(ConfigError, match="draft_quantization='fp8' rounds unquantised weights"):
        made(target, head, **ROUNDED)


def test_a_quantised_draft_model_is_refused(target: Path, tmp_path: Path) -> None:
    draft = save_tiny_model(DEEP, tmp_path / "draft")
    quantise(draft)
    config = EngineConfig(model=str(target), device="cpu", speculative=f"draft:{draft}", **ROUNDED)
    with pytest.raises(ConfigError, match="draft_quantization='fp8' rounds unquantised weights"):
        make_model_runner(config, SingleRank(), torch.device("cpu"), lambda done, total: None)
