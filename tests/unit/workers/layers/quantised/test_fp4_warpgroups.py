"""The Gluon products' own functions by threads: their barriers, places, biases and gates.

What compilers and tensor cores make of them is for tests/gpu/workers/test_fp4_experts.py.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="comes with Triton from 3.4 on")

from tests.fakes import fp4_experts_by_threads
from tests.fakes.fp4_experts_by_threads import Map, Pointer
from workers.layers.kept.stacks import Fp4Stack
from workers.layers.quantised.fp4_warpgroup_shape import WarpgroupShape
from workers.layers.routed_experts import Gating, gated

COUNTS = (300, 0, 128, 17, 200)
NUM_CHOSEN = 2
NOTHING = 7.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    stack: Fp4Stack
    matrices: np.ndarray
    bias: np.ndarray


def layer_of(rows, columns):
    stack = Fp4Stack(len(COUNTS), rows, columns, CPU)
    for place in range(len(COUNTS)):
        blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 127, (rows, columns // 32), dtype=torch.uint8)
        assert stack.take(place, slice(0, rows), blocks, scales)
    bias = torch.randn(len(COUNTS), rows).double().numpy()
    return Layer(stack, stack.dequantised().double().numpy(), bias)


def blocks_of(most_tokens, num_unused):
    """(3, blocks) as ExpertBlocks has them, and how many mean something."""
    blocks = [
        (expert, sum(COUNTS[:expert]) + first, min(most_tokens, count - first))
        for expert, count in enumerate(COUNTS)
        for first in range(0, count, most_tokens)
    ]
    unused = [(99, -1, 1 << 20)] * num_unused
    return np.array(blocks + unused).T, len(blocks)


def multiply(monkeypatch, x, layer, shape, pairs, weights, out, num_programs):
    blocks, num_blocks = blocks_of(shape.most_tokens, num_unused=2)
    words = layer.stack.words.flatten(0, 1).numpy()
    arguments = (
        *(Map(x, 2), Map(words, 4), Pointer(layer.stack.scales.flatten().numpy())),
        *(Pointer(layer.bias.reshape(-1)), Pointer(weights.reshape(-1)), Pointer(pairs)),
        *(Pointer(blocks.reshape(-1)), Pointer(np.array([num_blocks]), np.array(0))),
        *(Pointer(out.reshape(-1)), blocks.shape[1], len(weights), shape),
    )
    fp4_experts_by_threads.run(monkeypatch, arguments, num_programs)


def by_expert(values, layer, has_bias):
    """values (pairs, columns) @ each one's expert's matrix."""
    products = []
    for expert, rows in enumerate(np.split(values, np.cumsum(COUNTS)[:-1])):
        products.append(rows @ layer.matrices[expert].T + has_bias * layer.bias[expert])
    return np.concatenate(products)


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("most_tokens", [128, 256])
@pytest.mark.parametrize(
    ("depth", "width", "gating", "has_bias"),
    [(160, 160, Gating(1.702, 7.0), True), (256, 64, Gating(), False), (96, 72, Gating(), True)],
)
def test_gates_are_where_their_pairs_are(
    monkeypatch, depth, width, gating, has_bias, most_tokens
) -> None:
    torch.manual_seed(0)
    layer, num_pairs = layer_of(2 * width, depth), sum(COUNTS)
    x = torch.randn(num_pairs, depth).double().numpy()
    shape = WarpgroupShape(
        *(depth, width, NUM_CHOSEN, has_bias, True, gating.alpha, gating.limit, 3, most_tokens, 3)
    )
    # A place behind the last one: blocks are computed whole and stored as far as they go.
    out = np.full((num_pairs + 1, width), NOTHING)
    nobody = np.zeros((num_pairs // NUM_CHOSEN, NUM_CHOSEN))
    multiply(monkeypatch, x, layer, shape, np.zeros(num_pairs, int), nobody, out, num_programs=2)
    want = gated(torch.from_numpy(by_expert(x, layer, has_bias)), gating).numpy()
    assert relative_error(out[:-1], want) < 1e-6
    assert (out[-1] == NOTHING).all()


@pytest.mark.parametrize("most_tokens", [128, 256])
@pytest.mark.parametrize(
    ("depth", "width", "has_bias"), [(160, 160, True), (256, 64, False), (96, 136, True)]
)
def test_what_is_weighed_is_at_its_choice_and_token(
    monkeypatch, depth, width, has_bias, most_tokens
) -> None:
    torch.manual_seed(1)
    layer, num_pairs = layer_of(width, depth), sum(COUNTS)
    num_tokens = -(-num_pairs // NUM_CHOSEN)
    x = torch.randn(num_pairs, depth).double().numpy()
    pairs = torch.randperm(NUM_CHOSEN * num_tokens)[:num_pairs].numpy()
    weights = torch.rand(num_tokens, NUM_CHOSEN).double().numpy()
    shape = WarpgroupShape(
        *(depth, width, NUM_CHOSEN, has_bias, False, 1.0, 0.0, 5, most_tokens, 2)
    )
    out = np.full((NUM_CHOSEN, num_tokens, width), NOTHING)
    multiply(monkeypatch, x, layer, shape, pairs, weights, out, num_programs=3)
    want = np.full_like(out, NOTHING)
    weighed = by_expert(x, layer, has_bias) * weights.reshape(-1)[pairs][:, None]
    want[pairs % NUM_CHOSEN, pairs // NUM_CHOSEN] = weighed
    assert relative_error(out, want) < 1e-6
