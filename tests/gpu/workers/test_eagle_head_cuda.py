"""Kernels of the fused EAGLE-3 head and of graphs that make and verify drafts, which no model has,
against float64 and plain torch."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attention.qkv_projection import QKVProjection, Rotation
from tests.fakes.qkv_projection import finish
from tests.fakes.rows_going_on import GoingOn
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU
from workers.graphs import draft_rows
from workers.graphs.decode_step import StepRows, TokenRows, TorchStepKernels
from workers.graphs.draft_rows import TORCH_ROW_KERNELS, StaticRows
from workers.layers.cuda.draft_rows import CUDA_ROW_KERNELS, spread_rows
from workers.layers.cuda.greedy import TritonStepKernels
from workers.layers.cuda.likeliest import likeliest_columns, likeliest_named
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_rows", "num_tokens"), [(1, 32000), (64, 32000), (3, 151936), (256, 131)]
)
def test_the_likeliest_is_what_torch_says_bit_for_bit(dtype, num_rows, num_tokens) -> None:
    """Of noise, of few values that are often equal, and beside what is no number."""
    values = torch.tensor([-math.inf, -2.5, -0.0, 0.0, 1.5, math.inf, math.nan], device=CUDA)
    names = torch.randperm(num_tokens, device=CUDA)
    noise = torch.randn(num_rows, num_tokens, device=CUDA)
    few = [
        values[torch.randint(0, most, noise.shape, device=CUDA)]
        for most in range(1, len(values) + 1)
    ]
    for logits in (noise, noise.round(), *few):
        own = logits.to(dtype)
        first = own.cpu().argmax(dim=-1).to(CUDA)
        assert torch.equal(likeliest_columns(own), first)
        assert torch.equal(likeliest_named(own, names), names[first])


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_a_sum_that_is_normed_at_once_is_the_same_sum(num_tokens) -> None:
    stream, added = torch.randn(2, num_tokens, 4096, device=CUDA).bfloat16()
    weight = torch.randn(4096, device=CUDA).bfloat16()
    want = stream + added
    normed = add_rms_norm_(added.unsqueeze(0), stream, weight, 1e-5)
    assert torch.equal(stream, want)
    assert torch.equal(normed, rms_norm(want, weight, 1e-5))


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
@pytest.mark.parametrize("num_passes", [1, 4, 17])
def test_all_passes_of_drafts_are_spread_at_once(num_rows, num_passes) -> None:
    shape = (4 + num_passes + 1, num_rows)
    staged = torch.randint(0, 10**6, shape, device=CUDA)
    is_row = torch.arange(num_rows, device=CUDA) % 3 != 2
    staged[draft_rows.SLOTS] = torch.randperm(num_rows, device=CUDA)
    staged[draft_rows.POSITIONS] = torch.randint(0, 40, (num_rows,), device=CUDA) * is_row
    staged[draft_rows.IS_ROW] = is_row
    spread = []
    for kind in (draft_rows.spread_rows, spread_rows):
        static = StaticRows.allocate(num_rows + 1, num_passes + 1, CUDA)
        table = torch.full((num_rows, 64), -7, dtype=torch.int32, device=CUDA)
        kind(staged, static.passes(num_passes, num_rows), table[:, 1:])
        own = static.all_passes
        spread.append((table, *(getattr(own, field.name) for field in fields(own))))
    assert all(torch.equal(*pair) for pair in zip(*spread, strict=True))


@pytest.mark.parametrize("where", ["host", "device", "long", "told"])
def test_rows_go_on_as_plain_torch_says(where) -> None:
    """Samples in the host's memory, where a graph leaves them, or in the device's."""
    for seed in range(30):
        case = GoingOn.drawn(np.random.default_rng(seed), where == "told", CUDA)
        staged, table = case.staged.clone(), case.table.clone()
        CUDA_ROW_KERNELS.go_on(staged, 2, placed(case.rows_before, where), table)
        TORCH_ROW_KERNELS.go_on(case.staged, 2, case.rows_before, case.table)
        assert torch.equal(staged, case.staged)
        assert torch.equal(table, case.table)


def placed(rows, where):
    if where == "host":
        return replace(rows, sampled=rows.sampled.cpu().pin_memory())
    return replace(rows, sampled=rows.sampled.long()) if where == "long" else rows


@pytest.mark.parametrize(("num_rows", "tokens_per_row"), [(1, 4), (7, 3), (64, 6), (64, 17)])
@pytest.mark.parametrize("has_named", [False, True])
def test_rows_are_gathered_from_their_tokens(num_rows, tokens_per_row, has_named) -> None:
    num_tokens = num_rows * tokens_per_row
    drawn = torch.randint(0, 10**6, (4, num_tokens), device=CUDA)
    named = torch.randint(-1, 2, (num_tokens,), device=CUDA) * drawn[0]
    outcomes = []
    for kind in (TorchStepKernels, TritonStepKernels):
        tokens = StepRows.allocate(num_tokens, CUDA, 1)
        static = tokens.slots, tokens.input_ids, tokens.seq_lens, tokens.prefix_lens
        for own, values in zip(static, drawn, strict=True):
            own.copy_(values)
        rows = TokenRows.allocate(num_rows + 2, CUDA)
        kernels = kind((torch.zeros((1, 1), dtype=torch.int32),), torch.zeros(1).long())
        kernels.gather_rows(tokens, named if has_named else None, rows.first(num_rows))
        outcomes.append((tokens.input_ids, rows.slots, rows.seq_lens, rows.prefix_lens))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
