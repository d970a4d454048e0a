"""What the table of models declares of every native architecture on CPU, of each a tiny one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.quantised_checkpoints import FP8, by_scale, quantise_folder
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import (
    THROUGH_TRANSFORMERS,
    TINY_MODELS,
    TinyModel,
    one_of_each,
    random_prompt,
    save_tiny_model,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.loading.loader import load_model
from workers.models.features import TEXT_OF, ModelFeature, native_capability
from workers.models.registry import NATIVE_ARCHITECTURES
from workers.parallel.group import SingleRank, TPGroup
from workers.sampling.params import SamplingParams

CPU = torch.device("cpu")
MAX_DIFFERENCE = 5e-5
PROMPT = random_prompt(20)
NAMES = one_of_each()
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}


def having(feature: ModelFeature) -> list[str]:
    """Tiny models of the architectures that declare it."""
    return [
        name
        for architecture, name in NAMES.items()
        if feature in native_capability(architecture).features
    ]


def test_every_native_architecture_has_a_tiny_model() -> None:
    assert set(NAMES) >= set(NATIVE_ARCHITECTURES) - set(TEXT_OF)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(TINY_MODELS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def logits_of(folder: Path, tp: TPGroup | None = None, **changes: Any) -> torch.Tensor:
    config = EngineConfig(model=str(folder), model_impl="native", **changes)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp or SingleRank(), CPU, torch.float32)
    return ModelRows(loaded, torch_native_backend(loaded)).step({0: PROMPT})[0]


def on_two_ranks(folder: Path, **changes: Any) -> torch.Tensor:
    ranks = ThreadRanks(2)
    return ranks.run(lambda tp: logits_of(folder, tp, tp_size=2, **changes))[1]


@serves(ModelFeature.TENSOR_PARALLEL)
@pytest.mark.parametrize("name", having(ModelFeature.TENSOR_PARALLEL))
def test_two_ranks_compute_what_one_does(name: str, folder_of: Any) -> None:
    want = logits_of(folder_of(name))
    got = on_two_ranks(folder_of(name))
    torch.testing.assert_close(got, want, rtol=0, atol=MAX_DIFFERENCE)


@serves(ModelFeature.EXPERT_PARALLEL)
@pytest.mark.parametrize("name", having(ModelFeature.EXPERT_PARALLEL))
def test_two_ranks_with_experts_of_their_own_do(name: str, folder_of: Any) -> None:
    want = logits_of(folder_of(name))
    got = on_two_ranks(folder_of(name), ep_size=2)
    torch.testing.assert_close(got, want, rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.nightly
@serves(ModelFeature.QUANTISED)
@pytest.mark.parametrize("name", [n for n in having(ModelFeature.QUANTISED) if n != "gpt_oss"])
def test_quantised_weights_are_their_dequantised_ones(
    name: str, folder_of: Any, tmp_path: Path
) -> None:
    """gpt-oss's stacks have a format of their own: test_quantised_experts.py."""
    quantised = save_tiny_model(TINY_MODELS[name], tmp_path)
    reference = quantise_folder(
        quantised, BLOCKS, lambda module: by_scale(FP8, (16, 32), "weight_scale_inv")
    )
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((folder_of(name) / "config.json").read_text())
    save_file({k: v.contiguous() for k, v in reference.items()}, plain / "model.safetensors")
    torch.testing.assert_close(logits_of(quantised), logits_of(plain), rtol=0, atol=1e-5)


def without_window(name: str) -> TinyModel:
    tiny = {**TINY_MODELS, **THROUGH_TRANSFORMERS}[name]
    if "sliding_window" not in tiny.changes:
        return tiny
    return TinyModel(tiny.model_type, {**tiny.changes, "sliding_window": None})


@pytest.mark.nightly
@serves(ModelFeature.SPECULATION)
@pytest.mark.parametrize("name", [*having(ModelFeature.SPECULATION), "phi3"])
def test_drafts_change_no_text(name: str, tmp_path: Path) -> None:
    """Some drafts are right: a tiny model soon repeats itself."""
    folder = save_tiny_model(without_window(name), tmp_path)
    phrase = random_prompt(6, seed=3)
    prompts = [phrase * 3, random_prompt(9, seed=4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = {"device": "cpu", "num_cpu_threads": 1, "num_pages": 64, "max_running_requests": 4}
    texts = []
    for drafts in ({}, {"speculative": "ngram", "draft_policy": "fixed"}):
        changes: Any = {**settings, **drafts}
        engine = Engine.from_config(EngineConfig(model=str(folder), **changes))
        try:
            texts.append([one.token_ids for one in engine.generate(prompts, sampling)])
        finally:
            engine.close()
    assert texts[0] == texts[1]
