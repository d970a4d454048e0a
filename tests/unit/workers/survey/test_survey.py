"""A survey says of a folder what a start does with it."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from service.cli import app
from tests.fakes.quantised_checkpoints import FP8, by_scale, quantise_folder
from tests.fakes.tiny_models import (
    THROUGH_TRANSFORMERS,
    TINY_MODELS,
    TinyModel,
    save_tiny_model,
    tiny_config,
)
from tests.unit.workers.loading.test_quantised_experts import pair_of
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.loader import load_model
from workers.loading.model_folder import read_hf_config
from workers.parallel.group import SingleRank
from workers.survey.formats import StoredFormat
from workers.survey.survey import ModelSurvey, survey_model
from workers.survey.words import size

MODELS = {**TINY_MODELS, **THROUGH_TRANSFORMERS}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_model(MODELS[request.param], tmp_path)


def survey(folder: Path, gib: float | None = None, **changes: Any) -> ModelSurvey:
    settings: dict[str, Any] = {"device": "cpu", **changes}
    return survey_model(EngineConfig(model=str(folder), **settings), gib, 64)


@pytest.mark.parametrize(
    "folder", ["gpt_oss", "deepseek_v3", "phi3_windowed", "olmo2"], indirect=True
)
def test_shapes_are_those_of_what_is_loaded(folder: Path) -> None:
    config = EngineConfig(model=str(folder))
    loaded = load_model(config, SingleRank(), torch.device("cpu"), torch.float32)
    found = survey(folder)
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    own_bytes = sum(tensor.nbytes for tensor in tensors)
    assert found.runs == loaded.implementation
    assert found.memory.weight_bytes == pytest.approx(own_bytes, rel=0.02)
    attention = loaded.attention_config(64, torch.float32)
    assert found.memory.kv_bytes_a_token_in_view == attention.kv_bytes_per_token
    layouts = [len(group.layer_ids) for group in attention.kv_layout.groups]
    assert [group.num_layers for group in found.memory.groups] == layouts
    assert found.checkpoint_bytes == (folder / "model.safetensors").stat().st_size
    assert found.stored_as == ("float32",)


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_devices_ranks_and_memory_differ(folder: Path) -> None:
    on_cpu, on_gpu = survey(folder), survey(folder, 1.0, device="cuda", dtype="bfloat16")
    for found in (on_cpu, on_gpu):
        assert (found.runs, found.reason) == ("native", "")
    # Eight experts, two of them chosen.
    assert on_gpu.ranks == on_cpu.ranks
    assert on_cpu.ranks[4] == (1, 2, 4)
    assert [method for method, why_not in on_cpu.drafts.items() if why_not] == ["mtp"]
    assert on_gpu.drafts == {
        **on_cpu.drafts,
        "dflash": "drafters of blocks run on CPU only so far",
    }
    as_asked = survey(folder, device="cuda", model_impl="transformers").drafts
    assert "hands over no states" in as_asked["eagle3"]
    halved = survey(folder, 1.0, device="cuda", dtype="bfloat16", tp_size=2, ep_size=2)
    assert halved.drafts == on_gpu.drafts
    assert halved.memory.weight_bytes < on_gpu.memory.weight_bytes * 0.7
    assert halved.memory.kv_bytes_a_token == on_gpu.memory.kv_bytes_a_token // 2
    fit = halved.memory.fit
    assert fit is not None
    assert fit.num_tokens == 256 * 256  # every slot has a whole context
    assert (fit.num_requests, fit.num_longest) == (256, 256)
    tight = survey(folder, 0.0012, device="cuda", dtype="bfloat16", tp_size=2).memory.fit
    assert tight is not None
    assert 0 < tight.num_longest < tight.num_requests < 256


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_a_gpu_that_is_too_small_hides_nothing_and_shows_what_would_do(folder: Path) -> None:
    fits = survey(folder, 1.0, device="cuda", dtype="bfloat16")
    # Of one rank's weights two thirds; a half has room.
    gib = fits.memory.weight_bytes * 2 / 3 / 0.85 / (1 << 30)
    small = survey(folder, gib, device="cuda", dtype="bfloat16")
    assert small.memory.fit is None
    assert re.search(r"of a rank alone, \d+\.\d+ MiB, are larger than", small.memory.why_no_fit)
    assert small.memory.fitting_tp_sizes == (2, 4, 8)
    assert (small.runs, small.drafts, small.ranks) == (fits.runs, fits.drafts, fits.ranks)
    asked = ["models", str(folder), "--dtype", "bfloat16", "--gpu-memory-gib", str(gib)]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 1
    assert "would fit                   --tp 2 or 4 or 8\n" in told.output
    assert "LoRA                        yes" in told.output
    none = survey(folder, gib / 1000, device="cuda", dtype="bfloat16").memory
    assert none.fitting_tp_sizes == ()


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_what_was_not_measured_keeps_to_transformers_on_one_gpu(folder: Path) -> None:
    on_cpu, on_gpu = survey(folder), survey(folder, 1.0, device="cuda", dtype="bfloat16")
    assert (on_cpu.runs, on_gpu.runs) == ("native", "transformers")
    assert "not measured on one GPU" in on_gpu.reason
    # Of two ranks on, it runs natively.
    assert on_gpu.ranks == {1: (1,), **{n: on_cpu.ranks[n] for n in on_cpu.ranks if n > 1}}
    # By a start that has it run natively for these.
    dflash = {"dflash": "drafters of blocks run on CPU only so far"}
    assert on_gpu.drafts == {**on_cpu.drafts, **dflash}


@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
def test_quantised_weights_have_a_format_and_a_reason_where_they_are_refused(folder: Path) -> None:
    plain = survey(folder).memory.weight_bytes
    quantise_folder(folder, BLOCKS, lambda module: by_scale(FP8, (16, 32), "weight_scale_inv"))
    found = survey(folder)
    assert found.stored_as == ("fp8 (16x32 blocks)",)
    assert found.memory.weight_bytes == plain
    assert found.formats == (StoredFormat("fp8 (16x32 blocks)", 0, 12),)
    assert survey(folder, device="cuda", dtype="bfloat16").formats == found.formats
    assert 8 not in found.ranks  # cuts inside of blocks
    with pytest.raises(ModelLoadError, match="are served natively only"):
        survey(folder, model_impl="transformers")


def wide_model() -> TinyModel:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return TinyModel("llama", {**sizes, "num_hidden_layers": 2})


def test_on_hopper_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    folder = save_tiny_model(wide_model(), tmp_path)

    def on_gpu(**changes: Any) -> ModelSurvey:
        settings = {"device": "cuda", "dtype": "bfloat16", "quantization": "fp8", **changes}
        return survey(folder, **settings)

    kept, plain = on_gpu(), on_gpu(quantization=None)
    (one,) = kept.formats
    assert (one.num_kept, one.num_dequantised) == (8, 0)
    tensors = load_file(folder / "model.safetensors")
    linear = [tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    elements, rows = sum(x.numel() for x in linear), sum(len(x) for x in linear)
    # Two bytes become one, and a row has a scale of four.
    want = plain.memory.weight_bytes - elements + 4 * rows
    assert kept.memory.weight_bytes == want
    for changes in ({"quantized_products": "dequantize"}, {"deterministic": True}):
        dequantised = on_gpu(**changes)
        assert dequantised.formats[0].num_kept == 0
        assert dequantised.memory.weight_bytes == plain.memory.weight_bytes
    assert on_gpu(dtype="float16").formats[0].num_kept == 0


def test_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    quantised, _ = pair_of("gpt_oss", tmp_path)
    stored = survey(quantised, device="cuda", dtype="bfloat16")
    (one,) = stored.formats
    assert (one.title, one.num_dequantised) == ("mxfp4", 0)
    assert one.num_kept > 0
    told = CliRunner().invoke(app, ["models", str(quantised), "--dtype", "bfloat16"])
    assert f"mxfp4: {one.num_kept} layers as stored (Hopper, from sm90 on)" in told.output
    dequantised = survey(
        quantised, device="cuda", dtype="bfloat16", quantized_products="dequantize"
    )
    assert stored.memory.weight_bytes < dequantised.memory.weight_bytes


def test_windows_are_seen_and_weights_may_be_missing(tmp_path: Path) -> None:
    config = tiny_config(TinyModel("mistral", {"sliding_window": 128, "head_dim": 16}))
    config.max_position_embeddings = 4096
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(tmp_path)
    found = survey(tmp_path, 0.05, device="cuda", dtype="bfloat16")
    assert found.checkpoint_bytes is None
    assert [group.seen for group in found.memory.groups] == ["the last 128"]
    assert found.memory.kv_bytes_a_token == 0
    assert found.drafts["ngram"] == "layers with windows or chunks take no drafts yet"
    assert found.memory.fit is not None
    assert found.memory.fit.num_longest > 1


def test_warnings_of_transformers_are_not_repeated(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}
    odd = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 32}
    folder = save_tiny_model(TinyModel("llama", {"rope_parameters": rope | odd}), tmp_path)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    level = logger.level
    try:
        read_hf_config(folder)
        assert len(said) == 1  # so that there is something to leave out
        survey(folder)
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1
    assert logger.level == level


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (3 << 30, "3.00 GiB"),
        ((1 << 30) // 20, "51.20 MiB"),
        (1 << 20, "1.00 MiB"),
        (2048, "2.00 KiB"),
        (12, "12 bytes"),
    ],
)
def test_sizes_are_never_shown_as_nothing(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


def test_the_module_is_the_command() -> None:
    run = [sys.executable, "-m", "service.cli", "models", "builtin", "--device", "cpu"]
    told = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120)
    assert "builtin (LlamaForCausalLM)" in told.stdout


def test_a_token_is_kept_as_long_as_layers_see_it(tmp_path: Path) -> None:
    folder = save_tiny_model(MODELS["gpt_oss"], tmp_path / "windows")
    told = CliRunner().invoke(app, ["models", str(folder), "--device", "cpu"]).output
    assert re.search(r"a token +[\d,]+ bytes while every layer sees it, then [\d,]+ for as", told)
    folder = save_tiny_model(MODELS["llama3"], tmp_path / "whole")
    told = CliRunner().invoke(app, ["models", str(folder), "--device", "cpu"]).output
    assert re.search(r"a token +[\d,]+ bytes for as long as its request lives\n", told)
    assert "0.00" not in told


def test_the_command_tells_people_and_programs() -> None:
    run = CliRunner().invoke(app, ["models", "builtin", "--gpu-memory-gib", "1", "--tp", "2"])
    assert run.exit_code == 0, run.output
    assert "builtin (LlamaForCausalLM)" in run.output
    assert "A rank of TP 2, EP 1 on cuda:" in run.output
    assert "requests of 2,048" in run.output
    told = CliRunner().invoke(app, ["models", "builtin", "--json", "--device", "cpu"])
    fields = json.loads(told.output)
    assert (fields["runs"], fields["memory"]["fit"]) == ("native", None)
    refused = CliRunner().invoke(app, ["models", "builtin", "--json", "--ep", "2", "--tp", "2"])
    assert refused.exit_code == 1
    assert json.loads(refused.output)["runs"] == "refused"
    assert "has no experts" in json.loads(refused.output)["reason"]
    for wrong in (["--device", "tpu"], ["--dtype", "int3"]):
        assert CliRunner().invoke(app, ["models", "builtin", *wrong]).exit_code == 2
