"""Models that run row by row, on a GPU, beside transformers' own code on it."""

import pytest
import torch
import transformers

from tests.fakes.tiny_reference import config_of, random_prompt, save_random_model
from tests.gpu.beside_transformers import GpuEngine, compare
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.models.features import ROW_BY_ROW, ModelFeature
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUM_TOKENS = 32
TOLD = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
MODELS = {
    "bloom": "BloomForCausalLM",
    "gptj": "GPTJForCausalLM",
    "falcon": "FalconForCausalLM",
    "bart": "BartForCausalLM",
}
PROMPTS = [random_prompt(length) for length in (1, 24, 41, 3)]
MAX_ERROR = 1e-3
MAX_GAP_BF16 = 0.5
MIN_LIKELIEST_BF16 = 0.85


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    save_random_model(config_of(name, MODELS[name], {}), MODELS[name], folder)
    return str(folder)


def start(folder, **changes):
    settings = {"dtype": "float32", "num_pages": 1024, "max_running_requests": 4, **changes}
    return GpuEngine(EngineConfig(model=folder, max_context_len=200, **settings))


def logits_of(name, folder, dtype):
    reference = getattr(transformers, MODELS[name]).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    reference = reference.eval().to(CUDA)

    def of_tokens(_, tokens):
        ids = torch.tensor([tokens], device=CUDA)
        return reference(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]

    return of_tokens


def assert_equal(comparison):
    print("float32:", comparison)
    assert comparison.gaps.max() < MAX_ERROR, comparison
    assert comparison.errors.max() < MAX_ERROR, comparison


def test_float32_tokens_are_those_of_transformers(name, folder):
    """Batched, in chunks, alone, behind a cached prefix; pages of 1, 16, 64."""
    of_tokens = logits_of(name, folder, torch.float32)
    for changes in (
        {"page_size": 1},
        {"page_size": 16, "max_step_tokens": 16},
        {"page_size": 64, "max_running_requests": 1},
    ):
        engine = start(folder, **changes)
        assert_equal(compare(of_tokens, PROMPTS, engine.generate(PROMPTS, TOLD)))
        if changes["page_size"] == 16:
            results = engine.generate(PROMPTS, TOLD)
            assert results[2].num_cached_tokens >= 32
            assert_equal(compare(of_tokens, PROMPTS, results))
        engine.close()


def test_float32_requests_that_were_retracted_go_on(name, folder):
    engine = start(folder, page_size=1, num_pages=80)
    results = engine.generate(PROMPTS * 2, TOLD)
    assert engine.engine.stats().num_preemptions > 0
    assert_equal(compare(logits_of(name, folder, torch.float32), PROMPTS * 2, results))
    engine.close()


@NEEDS_FA3
@serves(ROW_BY_ROW.subject, ModelFeature.GPU)
def test_bfloat16_tokens_are_near_ties_apart(name, folder):
    engine = start(folder, dtype="bfloat16")
    results = engine.generate(PROMPTS, TOLD)
    comparison = compare(logits_of(name, folder, torch.bfloat16), PROMPTS, results)
    print("bfloat16:", comparison)
    assert comparison.gaps.max() < MAX_GAP_BF16, comparison
    assert (comparison.gaps == 0).mean() > MIN_LIKELIEST_BF16, comparison
    engine.close()
