"""Deterministic mode on a GPU: GEMMs whose rows know nothing of each other, and whole engines."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.company import CompanySpec, answers_in_company
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.errors import ConfigError
from workers.layers.gemm.configs import GemmShape
from workers.layers.gemm.invariant import InvariantGemmChooser
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUMBERS_OF_TOKENS = (1, 2, 16, 17, 33, 64, 65, 129, 200, 300, 513, 700, 1030)
SHAPES = [
    GemmShape(4096, 1024, "split"),
    GemmShape(1024, 1536, "whole"),
    GemmShape(131, 96, "whole"),
    GemmShape(64, 72, "split"),
]
PROMPT = tuple(3 + 7 * i % 4000 for i in range(150))
SAMPLING = SamplingParams(
    temperature=0.8, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=4
)
ALONE = CompanySpec(PROMPT, SAMPLING, 1, 1, 300, 80, 4000)
AMONG_OTHERS = CompanySpec(PROMPT, SAMPLING, 60, 40, 300, 80, 4000, seed=1)


def rows(num_tokens, in_features):
    generator = torch.Generator(device="cuda").manual_seed(3)
    return torch.randn(
        (num_tokens, in_features), dtype=torch.bfloat16, device=CUDA, generator=generator
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_product_in_any_number_of_rows(shape):
    weight = rows(shape.out_features, shape.in_features) * 0.05
    gemms = InvariantGemmChooser.for_device(CUDA).gemms(shape, [weight])
    x = rows(max(NUMBERS_OF_TOKENS), shape.in_features)
    whole = gemms[min(n for n in gemms if n >= len(x))](x, weight)
    exact = x.double() @ weight.double().t()
    assert (whole.sum(0) - exact).norm() / exact.norm() < 0.01
    for n in NUMBERS_OF_TOKENS:
        gemm = gemms[min(most for most in gemms if most >= n)]
        for start in (0, len(x) - n):
            part = gemm(x[start : start + n].contiguous(), weight)
            assert torch.equal(part, whole[:, start : start + n]), n


@pytest.mark.parametrize("width", [1536, 96])
def test_a_gated_row_has_the_same_activation_in_any_number_of_rows(width):
    weight = rows(2 * width, 1024) * 0.05
    shape = GemmShape(2 * width, 1024, "gated")
    gemms = InvariantGemmChooser.for_device(CUDA).gated_gemms(shape, [weight], "silu")
    x = rows(max(NUMBERS_OF_TOKENS), 1024)
    whole = gemms[min(n for n in gemms if n >= len(x))](x, weight)
    for n in NUMBERS_OF_TOKENS:
        part = gemms[min(most for most in gemms if most >= n)](x[:n], weight)
        assert torch.equal(part, whole[:n]), n


def answers(spec, **settings):
    """And how often a request was retracted."""
    engine = Engine.from_config(EngineConfig(deterministic=True, dtype="bfloat16", **settings))
    try:
        found = answers_in_company(engine, spec)
        engine.check_integrity()
        return found, engine.stats().num_preemptions
    finally:
        engine.close()


@pytest.mark.parametrize("backend", [pytest.param("fa3", marks=NEEDS_FA3), "triton"])
def test_one_request_has_one_answer_in_any_company(backend):
    settings = {"model": "builtin", "attention_backend": backend, "max_running_requests": 32}
    settings["page_size"] = 16
    (alone,), _ = answers(ALONE, num_pages=600, enable_cuda_graphs=False, **settings)
    tight = {"num_pages": 60, "max_step_tokens": 200}
    for way, change in (("roomy", {"num_pages": 600}), ("tight", tight)):
        found, num_retractions = answers(AMONG_OTHERS, **settings, **change)
        assert len(found) == 1, (way, found.most_common(2)[1][1])
        assert list(found) == [alone], way
        assert num_retractions > 0 or way == "roomy"


def test_gemma_has_one_answer_too(tmp_path):
    prompt = tuple(3 + 7 * i % 120 for i in range(60))
    settings = {"model": str(save_tiny_model(NATIVE["gemma3"], tmp_path)), "num_pages": 200}
    settings |= {"attention_backend": "triton", "page_size": 4, "max_running_requests": 16}
    (alone,), _ = answers(CompanySpec(prompt, SAMPLING, 1, 1, 60, 30, 120), **settings)
    found, _ = answers(CompanySpec(prompt, SAMPLING, 20, 16, 60, 30, 120, seed=1), **settings)
    assert list(found) == [alone]


def test_what_cannot_be_deterministic_is_refused():
    config = EngineConfig(
        model="builtin", deterministic=True, attention_backend="torch_native", num_pages=64
    )
    with pytest.raises(ConfigError, match="torch_native .* on a GPU"):
        Engine.from_config(config)
