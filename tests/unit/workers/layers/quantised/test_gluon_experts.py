"""The Gluon kernels of FP8 experts by threads: barriers, places, scales and rows of other blocks.

What compilers and tensor cores make of them is for tests/gpu/workers/test_kept_experts.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="comes with Triton from 3.4 on")

from tests.fakes import gluon_experts_by_threads
from tests.fakes.gluon_by_threads import Pointer
from tests.fakes.gluon_experts_by_threads import Map
from workers.layers.quantised.fp8_warpgroup_parts import WarpgroupShape

TOLERANCE = 1e-6
NUM_CHOSEN, BLOCK = 2, 128
COUNTS = (130, 0, 64, 5, 203)
"""Rows of each expert: a block and two rows, none, a warpgroup's, few, a block and both's."""


def blocks_of(counts):
    """(3, as many as there could be) and how many there are, as ExpertBlocks."""
    firsts = np.cumsum([0, *counts])
    found = [
        (expert, firsts[expert] + start, min(BLOCK, count - start))
        for expert, count in enumerate(counts)
        for start in range(0, count, BLOCK)
    ]
    padded = np.full((3, len(found) + 3), 10**6)
    padded[:, : len(found)] = np.array(found).T
    return padded, len(found)


def build(num_rows, num_columns, seed):
    """Rows by expert, an expert's matrix each, scales of both; and both times their scales."""
    rng = np.random.default_rng(seed)
    total = sum(COUNTS)
    rows = rng.integers(-8, 9, (total, num_columns)).astype(float)
    row_scales = rng.random((num_columns // BLOCK, total)) + 0.5
    matrices = rng.integers(-8, 9, (len(COUNTS), num_rows, num_columns)).astype(float)
    scales = rng.random((len(COUNTS), num_rows // BLOCK, num_columns // BLOCK)) + 0.5
    scales *= 0.01
    spread = scales.repeat(BLOCK, 1).repeat(BLOCK, 2)
    wide = rows * row_scales.repeat(BLOCK, 0).T
    experts = np.repeat(np.arange(len(COUNTS)), COUNTS)
    products = np.stack(
        [(matrices[e] * spread[e]) @ row for e, row in zip(experts, wide, strict=True)]
    )
    operands = Map(rows), Pointer(row_scales.reshape(-1)), Map(matrices.reshape(-1, num_columns))
    return SimpleNamespace(operands=(*operands, Pointer(scales.reshape(-1))), products=products)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_programs", [1, 3, 40])
def test_gated_rows_are_their_experts(monkeypatch, num_stages, num_programs) -> None:
    width, depth, total = 256, 384, sum(COUNTS)
    case = build(2 * width, depth, num_stages)
    blocks, num_blocks = blocks_of(COUNTS)
    out, scales = np.full(total * width, np.nan), np.full(width // BLOCK * total, np.nan)
    arguments = (
        *case.operands,
        *(Pointer(blocks.reshape(-1)), Pointer(np.array([num_blocks])), blocks.shape[1], total),
        *(Pointer(out), Pointer(scales), (1.5, 0.0)),
        WarpgroupShape(depth // BLOCK, width // BLOCK, 2 * width, BLOCK, width, 1, num_stages),
    )
    gluon_experts_by_threads.run(monkeypatch, "activate_kernel", arguments, num_programs)
    gate, up = case.products[:, :width], case.products[:, width:]
    want = gate / (1.0 + np.exp(-1.5 * gate)) * up
    largest = np.abs(want).reshape(total, -1, BLOCK).max(2)
    assert np.allclose(scales.reshape(-1, total).T, largest / 448.0, rtol=TOLERANCE)
    got = out.reshape(total, width) * scales.reshape(-1, total).T.repeat(BLOCK, 1)
    assert np.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize(("num_stages", "num_programs"), [(2, 1), (3, 5), (4, 2)])
def test_projected_rows_lie_by_choice_and_token(monkeypatch, num_stages, num_programs) -> None:
    hidden, depth, total = 512, 256, sum(COUNTS)
    case = build(hidden, depth, num_stages)
    blocks, num_blocks = blocks_of(COUNTS)
    rng = np.random.default_rng(7)
    pairs, weights = rng.permutation(total), rng.random(total)
    num_tokens = total // NUM_CHOSEN
    out = np.full(NUM_CHOSEN * num_tokens * hidden, np.nan)
    arguments = (
        *case.operands,
        *(Pointer(weights), Pointer(pairs), Pointer(blocks.reshape(-1))),
        *(Pointer(np.array([num_blocks])), blocks.shape[1], total, num_tokens),
        Pointer(out),
        WarpgroupShape(depth // BLOCK, hidden // 256, hidden, 256, BLOCK, NUM_CHOSEN, num_stages),
    )
    gluon_experts_by_threads.run(monkeypatch, "project_kernel", arguments, num_programs)
    got = out.reshape(NUM_CHOSEN, num_tokens, hidden)[pairs % NUM_CHOSEN, pairs // NUM_CHOSEN]
    assert np.allclose(got, case.products * weights[pairs][:, None], rtol=TOLERANCE, atol=1e-6)


def test_gates_may_be_limited(monkeypatch) -> None:
    case = build(2 * BLOCK, BLOCK, 3)
    blocks, num_blocks = blocks_of(COUNTS)
    total = sum(COUNTS)
    out, scales = np.full(total * BLOCK, np.nan), np.full(total, np.nan)
    arguments = (
        *case.operands,
        *(Pointer(blocks.reshape(-1)), Pointer(np.array([num_blocks])), blocks.shape[1], total),
        *(Pointer(out), Pointer(scales), (1.702, 7.0), WarpgroupShape(1, 1, 256, 128, 128, 1, 2)),
    )
    gluon_experts_by_threads.run(monkeypatch, "activate_kernel", arguments, 2)
    gate = np.minimum(case.products[:, :BLOCK], 7.0)
    up = np.clip(case.products[:, BLOCK:], -7.0, 7.0) + 1.0
    want = gate / (1.0 + np.exp(-1.702 * gate)) * up
    assert np.allclose(out.reshape(total, -1) * scales[:, None], want, rtol=1e-5, atol=1e-5)
