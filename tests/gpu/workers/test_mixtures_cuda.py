"""Mixtures of experts natively on a GPU: over fused kernels, in graphs, and those without them."""

from dataclasses import replace

import pytest

from tests.fakes.tiny_models import MIXTURES, STATEFUL, VOCAB_SIZE, TinyModel, save_tiny_model
from tests.gpu.engines import CUDA, GREEDY, generate, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps, rounded_gaps
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.models.features import ModelFeature
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
FUSED = ("qwen2_moe", "qwen3_moe", "gpt_oss")
CHUNKS = {"llama4": {"attention_chunk_size": 64}}
"""Of whole pages."""


def config_of(name, folder, **changes):
    tiny = {**MIXTURES, **STATEFUL}[name]
    changed = {**tiny.changes, **HEADS, **CHUNKS.get(name, {})}
    if "max_step_tokens" not in changes:
        changes["max_step_tokens"] = 128
    return EngineConfig(
        model=str(save_tiny_model(TinyModel(tiny.model_type, changed), folder)),
        model_impl="native",
        dtype="bfloat16",
        num_pages=200,
        max_running_requests=16,
        **changes,
    )


@serves(ModelFeature.GPU, ModelFeature.GRAPHS)
@pytest.mark.parametrize("name", [*FUSED, "glm4_moe", "llama4", "qwen3_next"])
def test_text_is_transformers_own_but_for_near_ties(name, tmp_path) -> None:
    """In chunks, together, with a prefix hit (the second round), with graphs; as without them."""
    prompts = prompts_of(8, VOCAB_SIZE, longest=150)
    graphed, eager = (
        generate(
            config_of(name, tmp_path, enable_cuda_graphs=is_graphed), prompts, GREEDY, rounds=2
        )
        for is_graphed in (True, False)
    )
    # Where two experts score nearly alike, rounding may choose another one: transformers' too.
    rounded = (rounded_gaps(tmp_path, prompts, graphed) > NEAR_TIE).float().mean()
    found = (gaps(tmp_path, prompts, graphed) > NEAR_TIE).float().mean()
    assert found < max(MAX_SHARE, 1.25 * rounded)
    assert share_equal(graphed, eager) > 0.9


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_model_is_what_runs_and_graphs_are_captured(name, tmp_path) -> None:
    """Unless another one is asked for."""
    config = replace(config_of(name, tmp_path), model_impl="auto")
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    try:
        assert isinstance(runner._model, CudaLlamaForCausalLM)
        assert runner._graphs is not None
    finally:
        runner.close()


def test_tokens_of_experts_are_counted_within_graphs(tmp_path) -> None:
    """Of the one layer that has experts, two for every row. Rows that fill up a graph count too."""
    told = []
    config = config_of("qwen3_moe", tmp_path, expert_load_interval_steps=1)
    engine = Engine.from_config(config, on_step=told.append)
    try:
        engine.generate(prompts_of(5, VOCAB_SIZE, longest=40), GREEDY)
    finally:
        engine.close()
    steps = [one for one in told if one.phase == "decode"]
    assert len(steps) > 20
    for step in steps:
        assert step.experts.tokens_by_part[0] >= 2 * step.batch_size
