"""Every kind of GEMM against float64, eager and in graphs, and what is kept of choices."""

import json
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from tests.gpu.needs import NEEDS_GPU
from workers.layers.gemm.build import (
    TRITON_GATED_GEMMS,
    TRITON_GEMMS,
    GemmBuilder,
    LtGemm,
    lt_configs,
)
from workers.layers.gemm.candidates import candidates
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import MAX_TOKENS, TOKEN_BUCKETS, GemmConfig, GemmShape, LtConfig
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits
from workers.layers.gemm.matrix import gated_gemms, partial_gemms
from workers.layers.gemm.table import Tables, dump_choices, read_choices

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda", 0)
LIMITS = DeviceLimits.of(CUDA) if torch.cuda.is_available() else HOPPER
TOLERANCE = 1e-2
MANY_TOKENS = [129, 192, 256, 300, 512]
"""Of one block size: the same compiled kernels serve them."""


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device=CUDA)


GATES = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


def gated_reference(x, weight, name):
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    return GATES[name](gate) * up


@pytest.fixture(scope="module")
def library():
    return GemmBuilder.on(CUDA).library


@pytest.mark.parametrize(("out_features", "in_features"), [(4096, 4096), (9001, 1024)])
@pytest.mark.parametrize("kind", ["tiled", "skinny"])
def test_every_product_of_many_tokens(kind, out_features, in_features) -> None:
    weight, shape = randn(out_features, in_features), GemmShape(out_features, in_features, "split")
    for num_tokens in MANY_TOKENS:
        x = randn(num_tokens, in_features)
        reference = x.double() @ weight.double().t()
        configs = [one for one in candidates(shape, num_tokens, LIMITS) if one.kind == kind]
        is_too_much = kind == "skinny" and num_tokens > MAX_TOKENS
        assert configs or is_too_much or not LIMITS.has_copy_engine
        for config in configs:
            out = TRITON_GEMMS[kind](x, weight, config)
            assert out.shape == (config.num_splits, num_tokens, out_features)
            assert relative_error(out.double().sum(0), reference) < TOLERANCE, config


@pytest.mark.parametrize(("width", "in_features"), [(14336, 4096), (4133, 1024)])
def test_every_activation_of_many_tokens(width, in_features) -> None:
    weight = randn(2 * width, in_features) * in_features**-0.5
    shape = GemmShape(2 * width, in_features, "gated")
    for num_tokens in MANY_TOKENS:
        x = randn(num_tokens, in_features)
        references = {name: gated_reference(x, weight, name) for name in GATES}
        configs = [config for config in candidates(shape, num_tokens, LIMITS) if config.is_gated]
        assert configs
        for config, name in product(configs, GATES):
            out = TRITON_GATED_GEMMS[config.kind](x, weight, config, name)
            assert relative_error(out, references[name]) < TOLERANCE, (config, name)


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_algorithm_of_cublaslt_at_other_token_counts(library, num_splits, dtype) -> None:
    x, weight = randn(256, 2048, dtype=dtype), randn(1536, 2048, dtype=dtype)
    reference = x.double() @ weight.double().t()
    configs = lt_configs(library, x, weight, num_splits, 24)
    assert configs
    for config in configs:
        gemm = LtGemm(library, config, weight)
        for num_tokens in (256, 131, 200):
            out = gemm(x[:num_tokens], weight)
            assert out.shape == (num_splits, num_tokens, 1536)
            error = relative_error(out.double().sum(0), reference[:num_tokens])
            assert error < TOLERANCE, (config, num_tokens)


def test_cublaslt_in_a_graph_uses_what_its_tensors_hold_then(library) -> None:
    x, weight = randn(192, 1024), randn(512, 1024)
    other = randn(192, 1024)
    for config in lt_configs(library, x, weight, 1, 8):
        gemm = LtGemm(library, config, weight)
        held = x.clone()
        gemm(held, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm(held, weight)
        held.copy_(other)
        graph.replay()
        assert torch.equal(out, gemm(other, weight)), config


def chooser_in(folder) -> GemmChooser:
    return GemmChooser(Tables({}, {}), folder / "gemm.json", LIMITS)


def test_choices_of_another_cublaslt_are_measured_anew(tmp_path) -> None:
    shape, weight = GemmShape(512, 1024, "whole"), randn(512, 1024)
    stale = LtConfig(1, 1, "ab" * 64)
    row = dict.fromkeys(TOKEN_BUCKETS) | {256: stale}
    (tmp_path / "gemm.json").write_text(dump_choices({str(shape): row}))
    choices = chooser_in(tmp_path).choose(shape, [weight])
    assert sorted(choices) == list(TOKEN_BUCKETS)
    assert choices[256] != stale
    assert read_choices(tmp_path / "gemm.json")[str(shape)] == choices


def test_only_missing_buckets_are_measured(tmp_path) -> None:
    shape, weight = GemmShape(512, 1024, "whole"), randn(512, 1024)
    known = dict.fromkeys(TOKEN_BUCKETS)
    del known[512]
    (tmp_path / "gemm.json").write_text(dump_choices({str(shape): known}))
    chooser_in(tmp_path).choose(shape, [weight])
    kept = json.loads((tmp_path / "gemm.json").read_text())[str(shape)]
    assert sorted(map(int, kept)) == list(TOKEN_BUCKETS)


@pytest.fixture(scope="module")
def chosen(library, tmp_path_factory):
    """A chooser that knows a config of every kind for weights (1024, 512)."""
    folder = tmp_path_factory.mktemp("chosen")
    weight, known = randn(1024, 512), {}
    for role in ("split", "gated"):
        lt = lt_configs(library, randn(512, 512), weight, 2, 1)[0]
        prefix = "gated_" if role == "gated" else ""
        few = GemmConfig("gated" if prefix else "skinny", 64, 64, 1, 3, 4)
        one = GemmConfig(f"{prefix}gemv", 2, 512, 1, 1, 4)
        tiled = GemmConfig(f"{prefix}tiled", 64, 64, 1, 3, 8)
        row = dict.fromkeys(TOKEN_BUCKETS) | {1: one, 16: few, 128: few, 256: tiled, 512: lt}
        known[f"1024x512 {role}"] = row
    (folder / "gemm.json").write_text(dump_choices(known))
    return chooser_in(folder)


@pytest.mark.parametrize("num_tokens", [1, 3, 100, 129, 250, 512, 1000, 9000])
def test_chosen_gemms_multiply_at_any_number_of_tokens(chosen, num_tokens) -> None:
    weights = [randn(1024, 512) * 512**-0.5 for _ in range(2)]
    x = randn(num_tokens, 512)
    for gemm in partial_gemms(chosen, weights, True):
        reference = x.double() @ gemm.weight.double().t()
        assert relative_error(gemm(x).double().sum(0), reference) < TOLERANCE
    for name in GATES:
        for gated in gated_gemms(chosen, weights, name):
            reference = gated_reference(x, gated.weight, name)
            assert relative_error(gated(x), reference) < TOLERANCE
