"""Models in transformers' own code that two GPUs share by its plans: its text but for near ties,
with graphs, and the text of one GPU."""

import pytest

from tests.fakes.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.tiny_reference import BANNED_TOKENS, build_reference, config_of, random_prompt
from tests.gpu.engines import NUM_TOKENS, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import GREEDY, alone
from tests.gpu.parallel.running_engine import running
from tests.gpu.workers.test_bridge_graphs import TINY
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps, rounded_gaps
from tests.proofs.served import serves
from workers.models.features import FLAT, ROW_BY_ROW, STATEFUL, ModelFeature

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS]

BY_SUBJECT = {
    "Olmo2ForCausalLM": "olmo2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Phi3ForCausalLM": "phi3",
    "Gemma4ForCausalLM": "gemma4_text",
    "MiniMaxForCausalLM": "minimax",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
}
KINDS = {"MiniMaxForCausalLM": STATEFUL, "GlmMoeDsaForCausalLM": ROW_BY_ROW}
UNBANNED = {**GREEDY, "logit_bias": dict.fromkeys(BANNED_TOKENS, -100.0)}


@NEEDS_FA3
@pytest.mark.parametrize("name", ["olmo2", "gemma3", "qwen3_moe"])
def test_text_of_two_ranks_is_transformers_own(name, tmp_path) -> None:
    """The second round has graphs of every size, and finds its prompts in the cache."""
    save_tiny_model(TINY[name], tmp_path)
    prompts = prompts_of(8, VOCAB_SIZE, longest=150)
    settings = {"model_impl": "transformers", "dtype": "bfloat16", "num_pages": 200, "tp_size": 2}
    with running({**settings, "model": str(tmp_path)}) as engine:
        first, second = engine.generate(prompts, [GREEDY] * len(prompts), rounds=2, captures=True)
        replays, said = engine.counts()["decode_replays"], engine.said()
        engine.end()
    assert "without CUDA graphs" not in said
    assert replays >= 2 * (NUM_TOKENS - 2)
    assert all(len(tokens) == NUM_TOKENS for tokens in second)
    assert share_equal(first, second) > 0.9
    rounded = (rounded_gaps(tmp_path, prompts, second) > NEAR_TIE).float().mean()
    found = (gaps(tmp_path, prompts, second) > NEAR_TIE).float().mean()
    assert found < max(MAX_SHARE, 1.25 * rounded)


@pytest.mark.parametrize(
    "class_name",
    [
        pytest.param(name, marks=serves(kind.subject, ModelFeature.TENSOR_PARALLEL_GPU))
        for name in BY_SUBJECT
        for kind in (KINDS.get(name, FLAT),)
    ],
)
def test_float32_text_of_two_ranks_is_that_of_one(class_name, tmp_path) -> None:
    """In chunks. Where experts or positions score nearly alike, another order of sums may choose
    other ones."""
    build_reference(config_of(BY_SUBJECT[class_name], class_name, {}), class_name, tmp_path)
    config = {
        **{"model": str(tmp_path), "model_impl": "transformers", "dtype": "float32"},
        **{"num_pages": 512, "max_step_tokens": 16, "max_context_len": 128},
        "attention_backend": "torch_native",
    }
    prompts = [random_prompt(length) for length in (3, 24, 41)]
    with running({**config, "tp_size": 2}) as engine:
        (together,) = engine.generate(prompts, [UNBANNED] * 3)
        engine.end()
    assert share_equal(together, alone(config, prompts, [UNBANNED] * 3)) > 0.9
