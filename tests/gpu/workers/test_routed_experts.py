"""Experts of transformers' code in grouped products of this repository, against float32."""

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.gpu.needs import NEEDS_GPU  # noqa: E402
from workers.layers.cuda.routed_experts import compile_ahead, routed_products  # noqa: E402
from workers.layers.routed_experts import (  # noqa: E402
    SILU,
    Gating,
    RoutedWeights,
    routed_in_torch,
)

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda", 0)
GPT_OSS = Gating(1.702, 7.0)


def randn(*shape, size=1.0):
    return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA) * size


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 300])
@pytest.mark.parametrize(
    ("gating", "has_bias", "hidden", "width"),
    [(SILU, False, 256, 64), (GPT_OSS, True, 720, 360)],
    ids=["silu", "gpt_oss"],
)
def test_routed_products(gating, has_bias, hidden, width, num_tokens) -> None:
    """Widths that no tile divides, as gpt-oss's 2,880; every class of tiles."""
    num_experts, num_chosen = 8, 4
    x = randn(num_tokens, hidden)
    scores = torch.rand(num_tokens, num_experts, device=CUDA)
    shares, ids = scores.topk(num_chosen)
    weights = RoutedWeights(
        randn(num_experts, 2 * width, hidden, size=4 * hidden**-0.5),
        randn(num_experts, hidden, width, size=width**-0.5),
        gating,
        randn(num_experts, 2 * width) if has_bias else None,
        randn(num_experts, hidden) if has_bias else None,
    )
    ours = routed_products(x, ids, shares.bfloat16(), weights).float()
    wanted = routed_in_torch(x.float(), ids, shares.bfloat16(), weights)
    assert (ours - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("num_chosen", [1, 3, 4])
def test_no_number_of_tokens_compiles_anything_later(num_chosen, monkeypatch) -> None:
    weights = RoutedWeights(randn(8, 128, 256), randn(8, 256, 64), SILU)
    compile_ahead(weights, num_chosen)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts)
    )
    for num_tokens in (1, 7, 33, 64, 100, 257, 2000):
        ids = torch.rand(num_tokens, 8, device=CUDA).topk(num_chosen).indices
        shares = torch.rand(ids.shape, device=CUDA)
        routed_products(randn(num_tokens, 256), ids, shares, weights)
    assert compiled == []
