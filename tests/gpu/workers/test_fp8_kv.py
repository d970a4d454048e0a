"""The FP8 KV cache through the whole engine on an NVIDIA GPU; weights by way of pinned memory."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.registry import ATTENTION_BACKENDS
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.gpu.engines import (
    BUILTIN,
    CUDA,
    GREEDY,
    gaps_to_likeliest,
    generate,
    prompts_of,
    share_equal,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.layers.formats.layer import unquantised
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.loader import load_model
from workers.loading.weight_lanes import PinnedLane, make_lanes
from workers.loading.weights import load_checkpoint
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

CPU = torch.device("cpu")
FP8 = {**BUILTIN, "kv_cache_dtype": "fp8_e4m3"}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
MAX_LOGPROB_ERROR = 6e-2
NEAR_TIE = 1.0


def prompt_logprobs(prompts, **changes):
    engine = Engine.from_config(EngineConfig(**BUILTIN, **changes))
    results = engine.generate(prompts, ONE_TOKEN)
    engine.close()
    return np.concatenate([[e.logprob for e in r.prompt_logprobs[1:]] for r in results])


def relative_error(ours, theirs):
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@NEEDS_FA3
@pytest.mark.parametrize("page_size", [1, 64, 128])
@pytest.mark.parametrize("max_step_tokens", [8192, 64])
def test_logprobs_are_near_those_of_the_full_cache(page_size, max_step_tokens) -> None:
    prompts = prompts_of(12, 4000)
    shape = {"page_size": page_size, "max_step_tokens": max_step_tokens}
    fp8 = prompt_logprobs(prompts, kv_cache_dtype="fp8_e4m3", **shape)
    assert 0.0 < relative_error(fp8, prompt_logprobs(prompts)) < MAX_LOGPROB_ERROR


@NEEDS_FA3
def test_scales_of_the_checkpoint_are_used(tmp_path) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(builtin_model_path(), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for kind in "kv":
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.1)
    save_file(tensors, path, metadata={"format": "pt"})
    config = EngineConfig(**{**FP8, "model": str(folder)})
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    scales = runner._backend.token_to_kv_pool.kv_scales
    assert torch.equal(scales, torch.full_like(scales, 0.1))
    prompts = prompts_of(12, 4000)
    engine = Engine.of_runner(config, runner)
    results = engine.generate(prompts, ONE_TOKEN)
    engine.close()
    fp8 = np.concatenate([[e.logprob for e in r.prompt_logprobs[1:]] for r in results])
    assert relative_error(fp8, prompt_logprobs(prompts)) < MAX_LOGPROB_ERROR


@NEEDS_FA3
@pytest.mark.parametrize("num_prompts", [1, 21])
def test_decoded_tokens_are_likely_ones(num_prompts) -> None:
    prompts = prompts_of(num_prompts, 4000)
    gaps = gaps_to_likeliest(prompts, generate(EngineConfig(**FP8), prompts, GREEDY, rounds=3))
    print(f"gaps: {(gaps == 0).mean():.3f} likeliest, largest {gaps.max():.3f}")
    assert (gaps == 0).mean() > 0.9
    assert np.quantile(gaps, 0.99) < NEAR_TIE


@NEEDS_FA3
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_graphs_give_the_tokens_of_eager_steps(page_size, monkeypatch) -> None:
    """With rows that are never split, so that graphs and eager steps run the same sums."""

    class UnsplitFp8(Fp8FlashAttentionBackend):
        num_splits = 1
        plans_splits_once = False
        capability = replace(Fp8FlashAttentionBackend.capability, name="fp8_unsplit")

    monkeypatch.setitem(ATTENTION_BACKENDS._classes, "fp8_unsplit", UnsplitFp8)
    prompts = prompts_of(16, 4000)
    base = {**FP8, "page_size": page_size, "attention_backend": "fp8_unsplit"}
    base["enable_prefix_cache"] = False
    eager = generate(EngineConfig(**base, enable_cuda_graphs=False), prompts, GREEDY)
    assert generate(EngineConfig(**base), prompts, GREEDY, rounds=3) == eager


@NEEDS_FA3
def test_a_prefix_hit_reads_what_a_cold_run_wrote() -> None:
    prompts = prompts_of(8, 4000)
    engine = Engine.from_config(EngineConfig(**FP8, page_size=16))
    cold = [result.token_ids for result in engine.generate(prompts, GREEDY)]
    warm = engine.generate(prompts, GREEDY)
    engine.close()
    assert any(result.num_cached_tokens for result in warm)
    assert share_equal([result.token_ids for result in warm], cold) > 0.8


@NEEDS_FA3
def test_retracted_requests_come_back_over_a_small_fp8_pool() -> None:
    prompts = prompts_of(40, 4000, longest=60)
    base = {**FP8, "page_size": 1, "max_running_requests": 16}
    expected = generate(EngineConfig(**base), prompts, GREEDY, rounds=2)
    tight = generate(EngineConfig(**base, num_pages=400, seed=1), prompts, GREEDY, rounds=2)
    assert share_equal(tight, expected) > 0.8


def test_plain_torch_serves_an_fp8_cache_on_the_device() -> None:
    prompts = prompts_of(4, 4000, longest=60)
    plain = {"attention_backend": "torch_native_fp8", "num_pages": 400}
    fp8 = prompt_logprobs(prompts, kv_cache_dtype="fp8_e4m3", **plain)
    full = prompt_logprobs(prompts, attention_backend="torch_native", num_pages=400)
    assert relative_error(fp8, full) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_lanes", [1, 6])
@pytest.mark.parametrize("name", ["qwen3", "llama_biased"])
def test_weights_on_the_device_are_those_on_the_host(tmp_path, name, num_lanes, dtype) -> None:
    folder = save_tiny_model(NATIVE[name], tmp_path, max_shard_size="100KB")
    config = EngineConfig(model=str(folder))
    on_host = load_model(config, SingleRank(), CPU, dtype).model
    on_device = load_model(config, SingleRank(), CUDA, dtype).model
    for parameter in on_device.parameters():
        parameter.fill_(torch.nan)
    lanes = make_lanes(dtype, CUDA, num_lanes)
    assert {type(lane) for lane in lanes} == {PinnedLane}
    load_checkpoint(
        on_device,
        unquantised(on_device),
        SafetensorsCheckpoint(folder),
        lanes,
        lambda done, total: None,
    )
    for (key, ours), theirs in zip(on_device.named_parameters(), on_host.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs), key
