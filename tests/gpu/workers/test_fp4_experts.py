"""Products of many tokens and MXFP4 experts by warpgroups, against float32 and matrices."""

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.engines import CUDA
from tests.gpu.needs import HAS_GPU, NEEDS_GPU, NEEDS_HOPPER
from workers.layers.cuda.expert_routing import choose_by_softmax, counted
from workers.layers.formats.mxfp4 import dequantise_mxfp4
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.stacks import Fp4Stack
from workers.layers.quantised.expert_products import ByMatrices
from workers.layers.quantised.fp4_experts import Fp4WarpgroupTiles
from workers.layers.quantised.warpgroup_limits import has_warpgroups
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch

NEEDS_WARPGROUPS = pytest.mark.skipif(
    not (HAS_GPU and has_warpgroups(DeviceLimits.of(CUDA))), reason="another GPU or Triton"
)
pytestmark = [*NEEDS_GPU, NEEDS_HOPPER, NEEDS_WARPGROUPS]

NUM_CHOSEN = 4
ROUNDED = 1e-2
"""Relative, of two products with a rounding to 16 bits between and behind them."""
GPT_OSS = Gating(1.702, 7.0)
WAYS = (Fp4WarpgroupTiles(256, 3, 5), Fp4WarpgroupTiles(128, 5, 13))
"""What the tables name, and short blocks."""


def fp4_stack(num, rows, columns):
    stack = Fp4Stack(num, rows, columns, CUDA)
    size = rows, columns // 32
    for place in range(num):
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, device=CUDA)
        scales = torch.randint(116, 123, size, dtype=torch.uint8, device=CUDA)
        assert stack.take(place, slice(0, rows), blocks, scales)
        assert torch.equal(stack.dequantised()[place], dequantise_mxfp4(blocks, scales))
    return stack


def kept_experts(num, hidden_size, width, gating, has_bias):
    stacks = fp4_stack(num, 2 * width, hidden_size), fp4_stack(num, hidden_size, width)
    biases = [None, None]
    if has_bias:
        biases = [torch.randn(num, n, device=CUDA).bfloat16() for n in (2 * width, hidden_size)]
    return KeptExperts(*stacks, gating, *biases)


def inputs_of(num_tokens, hidden_size, num_experts):
    x = torch.randn(num_tokens, hidden_size, device=CUDA).bfloat16()
    logits = torch.randn(num_tokens, num_experts, device=CUDA)
    return x, choose_by_softmax(logits, NUM_CHOSEN, 0, 1.0, True)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_tokens", [3, 130, 700, 2500])
@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "width", "gating", "has_bias"),
    [
        (6, 288, 160, GPT_OSS, True),
        (5, 128, 64, SILU, False),
        (8, 2880, 2880, GPT_OSS, True),
    ],
)
def test_products_are_those_of_dequantised_experts(
    num_experts, hidden_size, width, gating, has_bias, num_tokens, way
) -> None:
    torch.manual_seed(num_tokens)
    kept = kept_experts(num_experts, hidden_size, width, gating, has_bias)
    x, chosen = inputs_of(num_tokens, hidden_size, num_experts)
    parts = way.products(x, chosen, kept, 1)
    assert parts.shape == (NUM_CHOSEN, num_tokens, hidden_size)
    matrices = kept.gate_up.dequantised(), kept.down.dequantised()
    plain = RoutedWeights(*matrices, gating, kept.gate_up_bias, kept.down_bias)
    some = slice(max(0, num_tokens - 60), num_tokens)
    want = routed_in_torch(x[some].float(), chosen.ids[some], chosen.weights[some], plain)
    got = parts[:, some].float().sum(0)
    assert (got - want).norm() / want.norm() < ROUNDED
    # All of them, each to the other way's roundings.
    others = ByMatrices().products(x, chosen, kept, 1).float()
    assert (parts.float() - others).norm() / others.norm() < ROUNDED


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_same_bits_every_time(way) -> None:
    kept = kept_experts(6, 288, 160, GPT_OSS, True)
    x, chosen = inputs_of(3000, 288, 6)
    first = way.products(x, chosen, kept, 1)
    for _ in range(20):
        assert torch.equal(way.products(x, chosen, kept, 1), first)


def test_what_others_own_is_zeros() -> None:
    """As a rank's with half of the experts: the others' are one more."""
    kept = kept_experts(6, 288, 160, GPT_OSS, True)
    x, weights = inputs_of(1200, 288, 6)[0], torch.rand(1200, NUM_CHOSEN, device=CUDA)
    ids = torch.rand(1200, 7, device=CUDA).topk(NUM_CHOSEN).indices.int()
    chosen = counted(weights, ids, 7)
    parts = WAYS[0].products(x, chosen, kept, 2)
    assert not parts.transpose(0, 1)[ids == 6].any()
    others = ByMatrices().products(x, chosen, kept, 2).float()
    assert (parts.float() - others).norm() / others.norm() < ROUNDED


def test_a_captured_launch_follows_its_inputs() -> None:
    kept = kept_experts(6, 288, 160, GPT_OSS, True)
    x, chosen = inputs_of(1500, 288, 6)
    wanted = WAYS[0].products(x, chosen, kept, 1)
    late = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = WAYS[0].products(late, chosen, kept, 1)
    late.copy_(x)
    graph.replay()
    assert torch.equal(out, wanted)
