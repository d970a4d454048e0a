"""Each family of models says the same under two attention backends, but for near-ties.

Tiny random models in bfloat16. Where two texts first part, transformers, in float32 and on the
common prefix, has to be undecided between their tokens. Families whose attention one backend alone
has have no second one to be held against, here as elsewhere: cross-attention (BART, Whisper) is
torch_native's, and what modules with states keep goes through no backend. Llama 4's chunks are
fa3_chunks' and torch_native's.
"""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.h200.text_comparison import Verdict, first_differences
from tests.fakes.tiny_models import (
    LATENT,
    NATIVE,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
)
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.gpu.workers.test_window_accounts import MODELS as WINDOWED
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [random_prompt(4 + 23 * index, seed=index) for index in range(8)]
NEAR_TIE = 0.3
"""Of the logits' standard deviation: what roundings to bfloat16 may decide. On a CPU bfloat16 parts
from float32 at gaps of up to 0.2 (Gemma 2), 0.08 elsewhere."""
WIDE_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.06,
}  # fmt: skip
"""Every token goes to every expert: which one it gets is no matter of a rounding."""
CALM = {"initializer_range": 0.06, "head_dim": 64}


@dataclass(frozen=True)
class Family:
    model: TinyModel
    backends: tuple[str, str] = ("fa3", "triton")


def calm(name):
    tiny = NATIVE[name]
    return TinyModel(tiny.model_type, {**tiny.changes, **CALM})


FAMILIES = {
    "llama": Family(calm("llama3")),
    "qwen2": Family(calm("qwen2")),
    "qwen3": Family(calm("qwen3")),
    "mistral": Family(WINDOWED["mistral"]),
    "gemma2": Family(WINDOWED["gemma2"]),
    "gemma3": Family(WINDOWED["gemma3"]),
    "gpt_oss": Family(WINDOWED["gpt_oss"]),
    "deepseek": Family(TinyModel("deepseek_v3", {**LATENT["deepseek_v3"].changes, **WIDE_LATENT})),
    "llama4": Family(WINDOWED["llama4"], ("fa3_chunks", "torch_native")),
}


def texts_of(folder, backend):
    """Prompts together, cut into chunks, then decode steps, in graphs once there are any."""
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        attention_backend=backend,
        page_size=16,
        num_pages=400,
        max_step_tokens=128,
        max_running_requests=16,
    )
    engine = Engine.from_config(config)
    try:
        assert engine.info.attention_backend == backend
        texts = [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]
        engine.check_integrity()
        return texts
    finally:
        engine.close()


@torch.inference_mode()
def judge(reference, difference, ours):
    """What the reference makes of the place where two texts part."""
    prefix = PROMPTS[difference.prompt_index] + ours[: difference.position]
    logits = reference(torch.tensor([prefix], device=CUDA)).logits[0, -1].float()
    of_ours, of_theirs = logits[difference.our_token], logits[difference.their_token]
    bound = NEAR_TIE * float(logits.std())
    return Verdict(difference, float(of_ours), float(of_theirs), float(logits.max()), bound)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[needs_backend(one) for one in family.backends], id=name)
        for name, family in FAMILIES.items()
    ],
)
def test_text_is_the_same_but_for_near_ties(family, tmp_path):
    folder = save_tiny_model(family.model, tmp_path)
    ours, theirs = (texts_of(folder, backend) for backend in family.backends)
    differences = first_differences(ours, theirs)
    if differences:
        reference = eager_reference(folder).eval().to(CUDA)
        verdicts = [judge(reference, one, ours[one.prompt_index]) for one in differences]
        assert all(verdict.is_near_tie for verdict in verdicts), verdicts
