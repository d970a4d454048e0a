"""DeepSeek's family over fused kernels on a GPU: experts, whole models, graphs."""

import pytest
import torch

from tests.fakes.tiny_models import (
    LATENT,
    VOCAB_SIZE,
    TinyModel,
    eager_reference,
    save_tiny_model,
)
from tests.gpu.engines import CUDA, GREEDY, NUM_TOKENS, generate, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.routing import SoftmaxRouting
from workers.layers.moe.spec import MixtureSpec, SharedExperts
from workers.layers.sharding import ShardContext
from workers.models.cuda_deepseek import CudaDeepseekForCausalLM
from workers.models.features import ModelFeature
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

WIDE = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NEAR_TIE = 0.1
MAX_SHARE = 0.03
NAMES = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "youtu"]


def random_mixture(spec):
    """Of 192 hidden elements, and its products."""
    mixture = MixtureOfExperts(spec, 192, ShardContext(SingleRank(), torch.bfloat16, CUDA))
    for parameter in mixture.parameters():
        parameter.data.normal_(std=0.1)
    return mixture, GroupedMixture(mixture, is_summed=False)


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 700, 3000])
@pytest.mark.parametrize("width", [96, 128])
def test_experts_are_those_of_plain_torch(num_tokens, width) -> None:
    torch.manual_seed(0)
    routing = SoftmaxRouting(3, is_normed=False, factor=1.3)
    mixture, layer = random_mixture(MixtureSpec(16, width, routing, shared=SharedExperts(2)))
    x = torch.randn(num_tokens, 192, dtype=torch.bfloat16, device=CUDA)
    out = layer(x).float().sum(0)
    logits = x.float() @ mixture.router.weight.float().t()
    weights, ids = torch.topk(logits.softmax(-1), 3)
    shared = torch.tensor([16, 17], device=CUDA).expand(num_tokens, -1)
    ones = torch.ones(num_tokens, 2, device=CUDA)
    every = torch.cat((ids, shared), -1)
    factors = torch.cat((weights * 1.3, ones), -1)
    expected = torch.zeros(num_tokens, 192, device=CUDA)
    for expert in range(18):
        gate, up = (x.float() @ mixture.experts.gate_up[expert].float().t()).chunk(2, -1)
        product = (torch.nn.functional.silu(gate) * up) @ mixture.experts.down[expert].float().t()
        expected += product * (factors * (every == expert)).sum(-1, keepdim=True)
    assert (out - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_token_of_no_numbers_spoils_no_other_token() -> None:
    torch.manual_seed(0)
    routing = SoftmaxRouting(3, is_normed=False)
    _, layer = random_mixture(MixtureSpec(6, 96, routing, shared=SharedExperts(1)))
    x = torch.randn(40, 192, dtype=torch.bfloat16, device=CUDA)
    spoilt = x.clone()
    spoilt[::7] = torch.nan
    is_sound = spoilt.isfinite().all(dim=-1)
    out = layer(spoilt).sum(0)
    assert torch.equal(out[is_sound], layer(x).sum(0)[is_sound])
    assert out[~is_sound].isnan().all()


def model_of(name, tmp_path):
    tiny = LATENT[name]
    return save_tiny_model(TinyModel(tiny.model_type, {**tiny.changes, **WIDE}), tmp_path)


def config_of(folder, **changes):
    return EngineConfig(
        model=str(folder), dtype="bfloat16", num_pages=200, max_running_requests=16, **changes
    )


def reference_logits(folder, prompts, outputs, dtype):
    """Transformers' for each token of the outputs."""
    return logits_of(eager_reference(folder).eval().to(CUDA, dtype), prompts, outputs)


def logits_of(reference, prompts, outputs):
    """float32 (tokens of the outputs, vocabulary), each token's behind all of the text before."""
    found = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        text = torch.tensor([prompt + tokens], device=CUDA)
        with torch.inference_mode():
            found.append(reference(text).logits[0, len(prompt) - 1 : -1].float())
    return torch.cat(found)


def below_the_likeliest(logits, tokens):
    return logits.amax(-1) - logits.gather(1, tokens.unsqueeze(1)).squeeze(1)


def gaps(folder, prompts, outputs):
    """How far below its likeliest token's logit transformers, in float32, puts each token."""
    logits = reference_logits(folder, prompts, outputs, torch.float32)
    return below_the_likeliest(logits, torch.tensor(sum(outputs, []), device=CUDA))


def rounded_gaps(folder, prompts, outputs):
    """Of the tokens that transformers takes in bfloat16 after the same text."""
    rounded = reference_logits(folder, prompts, outputs, torch.bfloat16).argmax(-1)
    logits = reference_logits(folder, prompts, outputs, torch.float32)
    return below_the_likeliest(logits, rounded)


@pytest.mark.parametrize("name", NAMES)
@serves(ModelFeature.GPU, ModelFeature.GRAPHS)
def test_text_is_transformers_own_but_for_near_ties(name, tmp_path) -> None:
    """Alone and together, chunked, with a prefix hit (the second round), with graphs."""
    folder = model_of(name, tmp_path)
    prompts = prompts_of(6, VOCAB_SIZE, longest=150)
    settings = {"max_step_tokens": 128, "attention_backend": "fa3"}
    outputs = generate(config_of(folder, **settings), prompts, GREEDY, rounds=2)
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs)
    # Where two experts, or groups of them, score nearly alike, rounding may choose another one.
    assert (gaps(folder, prompts, outputs) > NEAR_TIE).float().mean() < MAX_SHARE


@pytest.mark.parametrize("backend", ["fa3", "flashmla"])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_graphs_give_the_text_of_eager_steps(name, backend, tmp_path) -> None:
    folder = model_of(name, tmp_path)
    prompts = prompts_of(12, VOCAB_SIZE, longest=150)
    graphed, eager = (
        generate(
            config_of(folder, attention_backend=backend, enable_cuda_graphs=is_graphed),
            prompts,
            GREEDY,
            rounds=2,
        )
        for is_graphed in (True, False)
    )
    assert share_equal(graphed, eager) > 0.95


def test_the_fused_model_is_what_runs_and_graphs_are_captured(tmp_path) -> None:
    folder = model_of("deepseek_v2_lite", tmp_path)
    runner = make_model_runner(config_of(folder), SingleRank(), CUDA, lambda done, total: None)
    try:
        assert isinstance(runner._model, CudaDeepseekForCausalLM)
        assert runner._backend.capability.name == "fa3"
        assert runner._graphs is not None
    finally:
        runner.close()
