"""The in-process engine over an FP8 KV cache: near the full cache's text, and the same however run.

The scales are the checkpoint's, and what is missing is said.
"""

import logging
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.capability import AttentionBackendError
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
MAX_LOGPROB_ERROR = 6e-2


def prompts_of(num, longest=90, seed=0):
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3, longest))] for _ in range(num)
    ]


PROMPTS = prompts_of(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("llama3"))


def run(folder, sampling=GREEDY, prompts=PROMPTS, **changes):
    engine = Engine.from_config(EngineConfig(model=str(folder), num_pages=600, **changes))
    try:
        results = engine.generate(prompts, sampling)
        engine.check_integrity()
        return results, engine
    finally:
        engine.close()


def tokens(results):
    return [result.token_ids for result in results]


def prompt_logprobs(folder, **changes):
    results, _ = run(folder, ONE_TOKEN, **changes)
    return np.concatenate([[e.logprob for e in r.prompt_logprobs[1:]] for r in results])


def add_scales(folder, k_scale, v_scale, num_layers=3):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}k_proj.k_scale"] = torch.tensor(k_scale)
        tensors[f"{prefix}v_proj.v_scale"] = torch.tensor(v_scale)
    save_file(tensors, path)


def test_logprobs_are_near_those_of_the_full_cache(folder) -> None:
    full, fp8 = (prompt_logprobs(folder, **changes) for changes in ({}, FP8))
    error = np.linalg.norm(fp8 - full) / np.linalg.norm(full)
    assert 0.0 < error < MAX_LOGPROB_ERROR


VARIATIONS = {
    "page_1": {"page_size": 1},
    "page_64": {"page_size": 64},
    "chunked": {"max_step_tokens": 16},
    "no_prefix_cache": {"enable_prefix_cache": False},
    "no_overlap": {"enable_overlap": False},
}


@pytest.mark.parametrize("changes", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_the_text_does_not_depend_on_how_it_was_run(folder, changes) -> None:
    expected, _ = run(folder, **FP8)
    got, _ = run(folder, **FP8, **changes)
    assert tokens(got) == tokens(expected)


def test_a_prefix_hit_reads_what_a_cold_run_wrote(folder) -> None:
    engine = Engine.from_config(EngineConfig(model=str(folder), num_pages=600, **FP8))
    cold = tokens(engine.generate(PROMPTS, GREEDY))
    warm = engine.generate(PROMPTS, GREEDY)
    engine.close()
    assert any(result.num_cached_tokens for result in warm)
    assert tokens(warm) == cold


def test_scales_of_the_checkpoint_are_the_pools(tmp_path, caplog) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    add_scales(folder, 0.5, 0.125)
    config = EngineConfig(model=str(folder), num_pages=10, **FP8)
    with caplog.at_level(logging.WARNING):
        runner = make_model_runner(
            config, SingleRank(), torch.device("cpu"), lambda done, all: None
        )
    pool = runner._backend.token_to_kv_pool
    assert pool.kv_scales.tolist() == [[0.5, 0.125]] * 3
    assert "scales" not in caplog.text


def test_scales_that_fit_the_values_lose_less_than_scales_that_saturate(tmp_path) -> None:
    errors = []
    for name, scale in (("fitting", 0.05), ("saturating", 1e-4)):
        folder = save_tiny_model(NATIVE["llama3"], tmp_path / name)
        add_scales(folder, scale, scale)
        full, fp8 = (prompt_logprobs(folder, **changes) for changes in ({}, FP8))
        errors.append(np.linalg.norm(fp8 - full) / np.linalg.norm(full))
    assert errors[0] < MAX_LOGPROB_ERROR < errors[1]


def test_missing_scales_are_warned_of_once(folder, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        run(folder, prompts=PROMPTS[:1], **FP8)
    warnings = [record for record in caplog.records if "scales" in record.getMessage()]
    assert len(warnings) == 1
    assert "may cost accuracy" in warnings[0].getMessage()


def test_unused_scales_are_mentioned(tmp_path, caplog) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    add_scales(folder, 0.5, 0.5)
    with caplog.at_level(logging.INFO):
        run(folder, prompts=PROMPTS[:1])
    assert "kv_cache_dtype=fp8_e4m3 uses them" in caplog.text


@pytest.mark.parametrize(
    ("backend", "why"),
    [("torch_native", "does not read a KV cache"), ("fa3_fp8", "runs on cuda, not on CPU")],
)
def test_a_backend_that_cannot_is_an_error_that_says_why(folder, backend, why) -> None:
    with pytest.raises(AttentionBackendError, match=why):
        run(folder, **FP8, attention_backend=backend, dtype="bfloat16")


def test_the_same_memory_holds_four_times_as_many_pages_as_float32(folder) -> None:
    base = {"model": str(folder), "kv_cache_bytes": 1 << 20, "page_size": 16}
    full, fp8 = (
        make_model_runner(
            EngineConfig(**base, **changes), SingleRank(), torch.device("cpu"), lambda done, all: 0
        ).num_pages
        for changes in ({}, FP8)
    )
    assert 4 * full <= fp8 < 4 * (full + 1)
