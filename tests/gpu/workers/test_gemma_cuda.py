"""Gemma over fused kernels on a GPU, with heads of 256 elements as the published members have:
text, graphs, the text part of a model for images."""

import pytest
import torch

from tests.fakes.tiny_models import (
    GEMMA,
    VOCAB_SIZE,
    TinyModel,
    eager_reference,
    gemma3_with_images,
    save_random_model,
    tiny_config,
)
from tests.gpu.engines import CUDA, GREEDY, NUM_TOKENS, generate, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.models.cuda_gemma import CudaGemmaForCausalLM
from workers.models.features import ModelFeature
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

WINDOW = 40
NEAR_TIE = 0.2
MAX_SHARE = 0.03
"""Of tokens beyond a near tie, whose gap is measured in standard deviations of the logits."""
WIDE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 320,  # no multiple of 512, as Gemma 3 12B's
    "intermediate_size": 640,
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
    "initializer_range": 0.06,  # with more, bfloat16 alone makes another text
}


def of_width(name):
    tiny = GEMMA[name]
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    own = caps if name == "gemma2" else {}
    return TinyModel(tiny.model_type, {**tiny.changes, **WIDE, **own})


def with_images():
    config = gemma3_with_images()
    for name, value in WIDE.items():
        setattr(config.text_config, name, value)
    return config


CONFIGS = {
    "gemma2": lambda: tiny_config(of_width("gemma2")),
    "gemma3": lambda: tiny_config(of_width("gemma3")),
    "gemma3_with_images": with_images,
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    return save_random_model(CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


def config_of(folder, **changes):
    base = {"dtype": "bfloat16", "num_pages": 100, "max_running_requests": 32, "page_size": 16}
    return EngineConfig(model=str(folder), **{**base, **changes})


def gaps(folder, prompts, outputs):
    """How far below its likeliest token's logit transformers, in float32, puts each token."""
    reference = eager_reference(folder).eval().to(CUDA)
    found = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        text = torch.tensor([prompt + tokens], device=CUDA)
        with torch.inference_mode():
            logits = reference(text).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, text[0, len(prompt) :, None]).squeeze(1)
        found.append((logits.max(dim=-1).values - chosen) / logits.std(dim=-1))
    return torch.cat(found)


@pytest.mark.parametrize(("num_prompts", "max_step_tokens"), [(1, 2048), (6, 64), (24, 2048)])
@serves(ModelFeature.GPU)
def test_text_is_transformers_own_but_for_near_ties(folder, num_prompts, max_step_tokens) -> None:
    """Alone, in chunks, and so many together that the rotation is a kernel of its own; with a
    prefix hit (the second round) and graphs."""
    prompts = prompts_of(num_prompts, VOCAB_SIZE, longest=150)
    config = config_of(folder, max_step_tokens=max_step_tokens, model_impl="native")
    outputs = generate(config, prompts, GREEDY, rounds=2)
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs)
    assert (gaps(folder, prompts, outputs) > NEAR_TIE).float().mean() < MAX_SHARE


@serves(ModelFeature.GRAPHS)
def test_graphs_give_the_text_of_eager_steps(folder) -> None:
    prompts = prompts_of(12, VOCAB_SIZE, longest=150)
    graphed, eager = (
        generate(config_of(folder, enable_cuda_graphs=is_graphed), prompts, GREEDY, rounds=2)
        for is_graphed in (True, False)
    )
    assert share_equal(graphed, eager) > 0.9


def test_the_fused_model_is_what_runs_with_the_projection_fused(folder) -> None:
    runner = make_model_runner(config_of(folder), SingleRank(), CUDA, lambda done, total: None)
    try:
        assert isinstance(runner._model, CudaGemmaForCausalLM)
        assert runner._backend.capability.name == "fa3_triton"
        assert runner._backend.fuses_decode_projection(1)
        assert not runner._backend.fuses_decode_projection(64)
        assert len(runner.pages_by_account) == 2
        assert runner._graphs is not None
    finally:
        runner.close()
