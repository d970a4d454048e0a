"""Kernels of the fused EAGLE-3 head that no model has, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from attention.qkv_projection import QKVProjection, Rotation
from tests.fakes.qkv_projection import finish
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU
from workers.layers.cuda.pair_norm import pair_norm
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.layers.rope_frequencies import RopeSpec, cos_sin_table

pytestmark = NEEDS_GPU
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def assert_close(got, want, dtype) -> None:
    assert got.dtype is dtype
    assert (got.double() - want).norm() < TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (7, 256), (300, 5120)])
def test_two_norms_stand_side_by_side(dtype, num_tokens, size) -> None:
    pair = torch.randn(2, num_tokens, size, device=CUDA).to(dtype)
    weights = torch.randn(2, size, device=CUDA).to(dtype)
    wide = pair.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    want = torch.cat([*(normed * weights.double().unsqueeze(1))], dim=-1)
    assert_close(pair_norm(*pair, (weights[0], weights[1]), 1e-5), want, dtype)
    ids = torch.randint(0, num_tokens, (9,), device=CUDA)
    rows = torch.randint(0, num_tokens, (9,), device=CUDA, dtype=torch.int32)
    gathered = pair_norm(*pair, (weights[0], weights[1]), 1e-5, ids, rows)
    assert_close(gathered, torch.cat((want[ids, :size], want[rows.long(), size:]), -1), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_kv", "head_dim"), [(8, 128), (2, 64), (1, 16)])
def test_keys_without_queries_go_to_their_places(dtype, num_kv, head_dim) -> None:
    num_tokens = 37
    cos_sin = cos_sin_table(RopeSpec("default", 1e4, head_dim, 256, {}), 256).to(CUDA)
    projected = torch.randn(1, num_tokens, 2 * num_kv * head_dim, device=CUDA).to(dtype)
    projection = QKVProjection(projected, Rotation(cos_sin, None, None), dtype)
    positions = torch.randint(0, 256, (num_tokens,), device=CUDA)
    places = torch.randperm(111, device=CUDA)[:num_tokens] + 1
    pages = torch.zeros(2, 112, 1, num_kv, head_dim, dtype=dtype, device=CUDA)
    rope = FusedRope(RopeShape(0, num_kv, head_dim), projection.rotation)
    rope(projected, positions, places, pages[0], pages[1], dtype)
    _, *wanted = finish(projection, positions, 0, num_kv)
    untouched = torch.ones(112, dtype=torch.bool, device=CUDA)
    untouched[places] = False
    for got, want in zip(pages.flatten(1, 2), wanted, strict=True):
        assert_close(got[places], want, dtype)
        assert not got[untouched].any()
