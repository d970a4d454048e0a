"""Models that keep states on a GPU: tokens are those of transformers' own code on it, however steps
cut, batch and cache them; decode steps in graphs where attention has them."""

import sys
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from tests.fakes.tiny_reference import config_of, random_prompt, save_random_model
from tests.fakes.tiny_state_models import MAX_CONTEXT_LEN, STATE_MODELS
from tests.gpu.beside_transformers import GpuEngine, compare, largest_differences
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.models.features import STATEFUL, ModelFeature
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

# torch's own operations, where transformers finds no others: those of fla are tuned for minutes
# when they are first used.
sys.modules.setdefault("fla", None)

NUM_TOKENS = 64
PLAIN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TOLD = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
# Every token to every expert: which ones a token gets, is no matter of a rounding.
ALL_EXPERTS = {"num_experts_per_tok": 4}
MODELS = {
    **STATE_MODELS,
    "qwen3_next": ("Qwen3NextForCausalLM", {**DELTA, **ALL_EXPERTS}),
    "bamba": ("BambaForCausalLM", {**MAMBA, "mamba_chunk_size": 8}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", DELTA),
}
PROMPTS = [random_prompt(length) for length in (1, 24, 41, 3, 90)]
# torch's own kernels round alike; chunks of another size do not.
MAX_ERROR = 1e-3
NEAR_TIE_BF16 = 0.25
MIN_LIKELIEST_BF16 = 0.85


class StateModel:
    def __init__(self, name, folder):
        self.class_name, changes = MODELS[name]
        self.folder = str(folder)
        save_random_model(config_of(name, self.class_name, changes), self.class_name, folder)

    @cache  # noqa: B019 - a model is its module's
    def logits_of(self, dtype):
        """As transformers computes them on the GPU, in one pass without a cache."""
        model_class = getattr(transformers, self.class_name)
        reference = model_class.from_pretrained(
            self.folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        reference = reference.eval().to(CUDA)

        def of_tokens(_, tokens):
            return reference(torch.tensor([tokens], device=CUDA), use_cache=False).logits[0]

        return of_tokens

    def engine(self, **changes):
        settings = {"dtype": "bfloat16", "max_running_requests": 8, "num_pages": 1024, **changes}
        config = EngineConfig(model=self.folder, max_context_len=MAX_CONTEXT_LEN, **settings)
        return GpuEngine(config)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return StateModel(request.param, tmp_path_factory.mktemp(request.param))


def assert_equal(comparison):
    print("float32:", comparison)
    assert comparison.gaps.max() < MAX_ERROR, comparison
    assert comparison.errors.max() < MAX_ERROR, comparison


def assert_near(model, results):
    """A token that is not the likeliest is as likely as bfloat16 can tell: by what it changes of
    transformers' own logits. Gated delta rules change by more than others."""
    rounded, exact = model.logits_of(torch.bfloat16), model.logits_of(torch.float32)
    comparison = compare(rounded, PROMPTS, results)
    rounding = largest_differences(rounded, exact, PROMPTS, results)
    print("bfloat16:", comparison, f"rounding {np.median(rounding):.3f}, {rounding.max():.3f}")
    assert (comparison.gaps <= np.maximum(NEAR_TIE_BF16, 2.0 * rounding)).all(), comparison
    assert (comparison.gaps == 0).mean() > MIN_LIKELIEST_BF16, comparison


def test_float32_tokens_are_those_of_transformers(model):
    """Batched, alone, in chunks, after a retraction, behind a cached prefix; pages of 1, 16, 64."""
    logits_of = model.logits_of(torch.float32)
    for changes in (
        {"page_size": 1},
        {"page_size": 16, "max_step_tokens": 16, "num_state_snapshots": 16},
        {"page_size": 64, "max_running_requests": 1},
    ):
        engine = model.engine(dtype="float32", **changes)
        # One after the other, a token takes a step of its own: two will do.
        prompts = PROMPTS[:2] if "max_running_requests" in changes else PROMPTS
        assert_equal(compare(logits_of, prompts, engine.generate(prompts, TOLD)))
        if "num_state_snapshots" in changes:
            results = engine.generate(PROMPTS, TOLD)
            assert results[-1].num_cached_tokens >= 64
            assert_equal(compare(logits_of, PROMPTS, results))
        engine.close()


def test_float32_requests_that_were_retracted_go_on(model):
    engine, prompts = model.engine(dtype="float32", page_size=16, num_pages=14), PROMPTS[:4] * 3
    results = engine.generate(prompts, TOLD)
    assert engine.engine.stats().num_preemptions > 0
    assert_equal(compare(model.logits_of(torch.float32), prompts, results))
    engine.close()


@NEEDS_FA3
@serves(STATEFUL.subject, ModelFeature.GPU, ModelFeature.GRAPHS)
def test_bfloat16_tokens_are_near_ties_apart_in_graphs(model):
    """The second time behind cached prefixes. No launch of a decode step waits for the device."""
    for page_size in (1, 16, 64):
        engine = model.engine(page_size=page_size, num_state_snapshots=16)
        assert engine.graphs is not None
        engine.launch_strictly(lambda plan: plan.is_decode)
        for sampling in (PLAIN, TOLD):
            results = engine.generate(PROMPTS, sampling)
            assert_near(model, results)
        assert results[-1].num_cached_tokens >= 64
        assert engine.num_replays > 1.5 * NUM_TOKENS
        engine.close()


@NEEDS_FA3
def test_launches_of_prompts_wait_for_nothing(model):
    """Mixed steps too, once kernels are there."""
    engine = model.engine(max_step_tokens=32, enable_prefix_cache=False, enable_cuda_graphs=False)
    wanted = engine.generate(PROMPTS, PLAIN)
    engine.launch_strictly()
    results = engine.generate(PROMPTS, PLAIN)
    assert [one.token_ids for one in results] == [one.token_ids for one in wanted]
    engine.close()


@NEEDS_FA3
def test_graphs_give_the_tokens_of_eager_steps(model):
    """Eight rows in a graph of eight, and attention that splits no row: the same kernels."""
    prompts = [random_prompt(length) for length in range(20, 28)]
    changes = {"attention_backend": "fa3_deterministic", "enable_prefix_cache": False}
    eager = model.engine(enable_cuda_graphs=False, **changes)
    wanted = [one.token_ids for one in eager.generate(prompts, PLAIN)]
    eager.close()
    graphed = model.engine(**changes)
    assert [one.token_ids for one in graphed.generate(prompts, PLAIN)] == wanted
    assert graphed.num_replays >= NUM_TOKENS - 2
    graphed.close()
