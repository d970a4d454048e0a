"""Products of experts whose weights come by tensor maps, against float32."""

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from workers.layers.cuda.expert_maps import MappedTiles
from workers.layers.cuda.expert_routing import counted, group
from workers.layers.cuda.expert_tiles import (
    BY_MAPS,
    BY_POINTERS,
    table_for,
    tiles_for,
)
from workers.layers.cuda.routed_experts import ProductsHere, routed_products
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.moe.products import experts_in_torch
from workers.layers.routed_experts import SILU, Gating, RoutedWeights

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
CUDA = torch.device("cuda", 0)
GPT_OSS = Gating(1.702, 7.0)
NUM_EXPERTS, NUM_CHOSEN = 8, 4
MAX_ERROR = 0.01


def randn(*shape, size=1.0):
    return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA) * size


def weights_of(hidden, width, gating=SILU):
    """Biases where the gate is gpt-oss's."""
    has_bias = gating is GPT_OSS
    return RoutedWeights(
        randn(NUM_EXPERTS, 2 * width, hidden, size=4 * hidden**-0.5),
        randn(NUM_EXPERTS, hidden, width, size=width**-0.5),
        gating,
        randn(NUM_EXPERTS, 2 * width) if has_bias else None,
        randn(NUM_EXPERTS, hidden) if has_bias else None,
    )


def choice(num_tokens, num_experts=NUM_EXPERTS):
    """Shares that bfloat16 has, and ids."""
    scores = torch.rand(num_tokens, num_experts, device=CUDA)
    shares, ids = scores.topk(NUM_CHOSEN)
    return shares.bfloat16(), ids


def wanted(x, ids, shares, weights):
    tensors = weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias
    gate_up, down, *biases = (None if one is None else one.float() for one in tensors)
    plain = RoutedWeights(gate_up, down, weights.gating, *biases)
    return experts_in_torch(x.float(), ids, shares.float(), plain)


def takes_maps(num_tokens, weights):
    limits = DeviceLimits.of(CUDA)
    table = table_for(weights, limits)
    both = tiles_for(table, num_tokens * NUM_CHOSEN, NUM_EXPERTS, limits.shared_bytes)
    return [isinstance(tiles, MappedTiles) for tiles in both]


def error(ours, theirs):
    return float((ours.float() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("num_tokens", [16, 48, 80, 400])
@pytest.mark.parametrize(
    ("hidden", "width", "gating"),
    [(2880, 2880, GPT_OSS), (2048, 1408, SILU), (2048, 768, SILU), (72, 96, GPT_OSS)],
    ids=["gpt_oss", "deepseek", "qwen3", "odd"],
)
def test_products(hidden, width, gating, num_tokens) -> None:
    """Every class of mapped tiles; widths and depths that no tile divides among them."""
    weights, x = weights_of(hidden, width, gating), randn(num_tokens, hidden)
    shares, ids = choice(num_tokens)
    assert all(takes_maps(num_tokens, weights))
    ours = routed_products(x, ids, shares, weights)
    assert error(ours, wanted(x, ids, shares, weights)) < MAX_ERROR


@pytest.mark.parametrize(
    "tiles",
    [
        MappedTiles(16, 64, 64, 6, 4, 12, True),
        MappedTiles(32, 64, 128, 3, 4, 2, True),
        MappedTiles(64, 128, 64, 3, 4, 12, False),
        MappedTiles(128, 128, 64, 4, 8, 12, False),
    ],
    ids=str,
)
def test_products_of_tiles_that_the_table_may_get(tiles) -> None:
    weights, x = weights_of(200, 144, GPT_OSS), randn(200, 200)
    shares, ids = choice(200)
    grouped = group(counted(shares.float(), ids.int(), NUM_EXPERTS), tiles.block_rows)
    activated = tiles.activate(
        x, weights.gate_up, grouped, NUM_CHOSEN, weights.gate_up_bias, GPT_OSS
    )
    ours = tiles.project(activated, weights.down, shares.float(), grouped, weights.down_bias)
    assert error(ours.float().sum(0), wanted(x, ids, shares, weights)) < MAX_ERROR


def test_limits_cut_what_they_should() -> None:
    weights, x = weights_of(136, 104, GPT_OSS), randn(400, 136, size=10.0)
    shares, ids = choice(400)
    ours = routed_products(x, ids, shares, weights)
    assert error(ours, wanted(x, ids, shares, weights)) < MAX_ERROR


@pytest.mark.parametrize("num_tokens", [16, 48, 80, 400])
def test_pairs_of_other_ranks_add_nothing(num_tokens) -> None:
    weights, x = weights_of(256, 96), randn(num_tokens, 256)
    shares, ids = choice(num_tokens, 2 * NUM_EXPERTS)
    ids = ids.clamp(max=NUM_EXPERTS)
    ours = ProductsHere(2)(x, ids, shares, weights)
    assert error(ours, wanted(x, ids, shares, weights)) < MAX_ERROR


@pytest.mark.parametrize("num_tokens", [16, 48, 80, 400])
def test_a_row_has_the_same_bits_beside_what_is_no_number(num_tokens) -> None:
    weights, x = weights_of(200, 136), randn(num_tokens, 200)
    shares, ids = choice(num_tokens)
    alone = routed_products(x, ids, shares, weights)
    is_kept = torch.arange(num_tokens, device=CUDA) % 3 > 0
    x[~is_kept] = torch.nan
    beside = routed_products(x, ids, shares, weights)
    assert torch.equal(alone[is_kept], beside[is_kept])
    assert beside[~is_kept].isnan().all()


@pytest.mark.parametrize("num_tokens", [48, 400])
def test_a_graph_replays_them(num_tokens) -> None:
    weights, x = weights_of(256, 96), randn(num_tokens, 256)
    shares, ids = choice(num_tokens)
    routed_products(x, ids, shares, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = routed_products(x, ids, shares, weights)
    for _ in range(3):
        x.copy_(randn(num_tokens, 256))
        for kept, drawn in zip((shares, ids), choice(num_tokens), strict=True):
            kept.copy_(drawn)
        graph.replay()
        assert error(ours, wanted(x, ids, shares, weights)) < MAX_ERROR


def test_what_no_map_has_goes_by_pointers() -> None:
    limits = DeviceLimits.of(CUDA)
    assert table_for(weights_of(256, 96), limits) is BY_MAPS
    weights, x = weights_of(256, 100), randn(400, 256)
    assert table_for(weights, limits) is BY_POINTERS
    shares, ids = choice(400)
    ours = routed_products(x, ids, shares, weights)
    assert error(ours, wanted(x, ids, shares, weights)) < MAX_ERROR
