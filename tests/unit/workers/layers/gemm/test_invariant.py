"""Deterministic mode's GEMMs: which are tried, and that only those with the same bits are taken."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.errors import ConfigError
from workers.layers.cuda import residual_stream
from workers.layers.gemm import invariant
from workers.layers.gemm.configs import TOKEN_BUCKETS, GemmConfig, GemmShape
from workers.layers.gemm.cublaslt import CublasLtError
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.gemm.invariant import InvariantGemmChooser, likely_configs, num_parts
from workers.layers.gemm.table import Tables

HOPPER = DeviceLimits((9, 0), 227 << 10)
SHAPE = GemmShape(8192, 256, "split")
FAST = GemmConfig("skinny", 128, 128, 1, 3, 8)


def product(x, weight, new=torch.empty):
    return (x.double() @ weight.double().t()).to(x.dtype).unsqueeze(0)


def other_order(x, weight, new=torch.empty):
    """As one that rounds a little otherwise."""
    out = product(x, weight)
    out[0, -1, -1] = torch.nextafter(out[0, -1, -1].float(), torch.tensor(9e9)).to(out.dtype) * 2
    return out


class FakeBuilder:
    """Multiplies by what is said of a config; raises what is said."""

    limits = HOPPER

    def __init__(self, otherwise, by_config):
        self.tried = []
        self._otherwise, self._by_config = otherwise, by_config

    @property
    def library(self):
        raise invariant.CublasLtUnavailableError("no such library")

    def multiply(self, config, weight):
        self.tried.append(config)
        gemm = self._by_config.get(config, self._otherwise)
        if isinstance(gemm, Exception):
            raise gemm
        return gemm


def choose(monkeypatch, builder, known=None):
    monkeypatch.setattr(invariant, "FixedGemm", lambda parts: product)
    tables = Tables({str(SHAPE): known or {}}, {})
    chooser = InvariantGemmChooser(tables, SimpleNamespace(is_file=lambda: False), HOPPER)
    monkeypatch.setattr(chooser, "_builder", lambda device: builder)
    weight = torch.randn(SHAPE.out_features, SHAPE.in_features).to(torch.bfloat16)
    return chooser.gemms(SHAPE, [weight[:64]])


@pytest.fixture(autouse=True)
def few_products(monkeypatch):
    """Those of many tokens take a CPU too long, as do many; what differs here always does."""
    monkeypatch.setattr(GemmShape, "buckets", (1, 16, 64))
    monkeypatch.setattr(invariant, "_MIN_RESULTS", 1 << 12)


def test_what_is_known_to_be_fast_is_taken_where_its_bits_are_the_same(monkeypatch):
    builder = FakeBuilder(product, {})
    gemms = choose(monkeypatch, builder, {16: FAST})
    assert builder.tried[1] == FAST
    assert len(builder.tried) == 3
    assert gemms.keys() == {1, 16, 64, sys.maxsize}


def test_another_order_of_sums_is_never_taken(monkeypatch):
    right = GemmConfig("skinny", 64, 64, 1, 4, 4)

    def taken(x, weight, new=torch.empty):
        return product(x, weight)

    failing = CublasLtError("cublasLtMatmul", "CUBLAS_STATUS_NOT_SUPPORTED")
    builder = FakeBuilder(other_order, {right: taken, FAST: failing})
    gemms = choose(monkeypatch, builder, {16: FAST})
    assert all(gemm is taken for gemm in gemms.values())
    assert FAST in builder.tried


def test_where_none_has_the_same_bits_the_fixed_kernel_is_taken(monkeypatch):
    gemms = choose(monkeypatch, FakeBuilder(other_order, {}))
    assert all(gemm is product for gemm in gemms.values())


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        (GemmShape(4096, 4096, "split"), 2),
        (GemmShape(4096, 4096, "whole"), 1),
        (GemmShape(6144, 4096, "split"), 1),
        (GemmShape(64, 72, "split"), 1),
        (GemmShape(28672, 4096, "gated"), 1),
    ],
)
def test_in_how_many_parts_is_the_shapes_matter_alone(shape, parts):
    assert num_parts(shape) == parts
    for bucket in TOKEN_BUCKETS:
        assert {config.num_splits for config in likely_configs(shape, bucket)} == {parts}


def test_numbers_of_tokens_that_an_algorithm_does_not_serve_go_to_the_fixed_kernel():
    """LtGemm itself would take the library's own first choice."""

    class Lt:
        def serves(self, num_tokens):
            return num_tokens != 7

        def __call__(self, x, weight, new):
            return "lt"

    gemm = invariant._LtOr(Lt(), lambda x, weight, new: "fixed")
    assert gemm(torch.empty(8, 4), None) == "lt"
    assert gemm(torch.empty(7, 4), None) == "fixed"


def ranks_without_peers(size):
    return SimpleNamespace(size=size, share_memory=lambda num_bytes: None)


def test_ranks_join_in_one_order_or_not_at_all():
    embedding = SimpleNamespace(weight=torch.empty(16, 64, dtype=torch.bfloat16))
    two = residual_stream.invariant_stream_ways(ranks_without_peers(2), embedding)
    assert isinstance(two.after_mlp, residual_stream._CollectiveJoin)
    with pytest.raises(ConfigError, match="3 ranks have no peer memory"):
        residual_stream.invariant_stream_ways(ranks_without_peers(3), embedding)
    none = residual_stream._NoWayForAsMany()
    with pytest.raises(ConfigError, match="9 tokens of a step.*lower max_step_tokens"):
        none.join(None, torch.empty(9, 4), None, None)
