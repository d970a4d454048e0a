"""The Gluon extend kernel's own functions by threads: its barriers, masks and places.

What compilers and tensor cores make of it is for tests/gpu/attention/test_gluon_extend.py.
"""

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="comes with Triton from 3.4 on")

from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gluon_shape import GluonTuning, gluon_shape
from tests.fakes import gluon_by_threads
from tests.fakes.gluon_by_threads import Descriptor, Pointer

TOLERANCE = 1e-4
ODD = ((0, 5), (7, 130), (0, 257), (128, 2), (33, 16), (0, 1), (1000, 1), (63, 65))
EVEN = ((0, 256), (512, 384))


@dataclass(frozen=True)
class Step:
    """Rows of (cached, new) tokens over pages in random order; stale memory is NaN."""

    lengths: tuple[tuple[int, int], ...]
    geometry: ExtendGeometry
    q: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]

    def row(self, cached, new, first, k, v):
        """(new, heads, dim)."""
        heads = np.arange(self.geometry.num_q_heads) // self.geometry.group
        scores = np.einsum("qhd,khd->hqk", self.q[first : first + new], k[:, heads])
        scores *= self.geometry.head_dim**-0.5
        scores[:, np.arange(cached + new) > (cached + np.arange(new))[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v[:, heads])


def build(lengths, geometry):
    rng = np.random.default_rng(len(lengths))
    shape = (geometry.kv_heads, geometry.head_dim)
    kv = [[rng.standard_normal((sum(one), *shape)) for one in lengths] for _ in range(2)]
    num_new = sum(new for _, new in lengths)
    q = rng.standard_normal((num_new, geometry.num_q_heads, geometry.head_dim))
    return Step(lengths, geometry, q, *kv)


def paged(step):
    """K, V (tokens of the pool, elements) and the rows' pages."""
    size, width = step.geometry.page_size, step.geometry.kv_heads * step.geometry.head_dim
    num_pages = [-(-sum(one) // size) for one in step.lengths]
    pages = np.random.default_rng(1).permutation(sum(num_pages) + 3)
    table = np.full((len(num_pages), max(num_pages) + 2), pages[-1])
    pools = [np.full((len(pages) * size, width), np.nan) for _ in range(2)]
    for i, first in enumerate(np.cumsum([0, *num_pages[:-1]])):
        table[i, : num_pages[i]] = pages[first : first + num_pages[i]]
        tokens = (table[i, : num_pages[i], None] * size + np.arange(size)).reshape(-1)
        for pool, rows in zip(pools, (step.k, step.v), strict=True):
            pool[tokens[: len(rows[i])]] = rows[i].reshape(-1, width)
    return *pools, table


def launch(monkeypatch, step, tuning, keys):
    """keys: of each row, as the kernel is told."""
    k, v, table = paged(step)
    starts = np.cumsum([0, *(new for _, new in step.lengths)])
    out = np.full(step.q.size, 7.0)
    token_stride = step.geometry.num_q_heads * step.geometry.head_dim
    num_tiles = len(step.q) * step.geometry.group // 128 + len(step.lengths)
    arguments = (
        *(Pointer(step.q.reshape(-1)), token_stride, Descriptor(k), Descriptor(v)),
        *(Pointer(table.reshape(-1)), table.shape[1], Pointer(starts), Pointer(np.array(keys))),
        *(Pointer(out), len(keys), step.geometry.head_dim**-0.5),
        gluon_shape(step.geometry, tuning),
    )
    gluon_by_threads.run(monkeypatch, arguments, (step.geometry.kv_heads, num_tiles))
    return starts, out.reshape(step.q.shape)


@pytest.mark.parametrize(
    ("lengths", "heads", "tuning"),
    [
        (ODD, (1, 4, 128, 128, 16), GluonTuning()),
        (ODD, (2, 4, 128, 128, 64), GluonTuning(128, 2)),
        (ODD, (1, 7, 64, 64, 256), GluonTuning(64, 4)),
        (EVEN, (1, 8, 64, 64, 64), GluonTuning()),
        (((2049, 333),), (1, 1, 64, 64, 32), GluonTuning(64, 3)),
    ],
)
def test_every_pair_sees_what_it_should(monkeypatch, lengths, heads, tuning) -> None:
    step = build(lengths, ExtendGeometry(*heads))
    starts, out = launch(monkeypatch, step, tuning, [sum(one) for one in lengths])
    for i, (cached, new) in enumerate(lengths):
        expected = step.row(cached, new, starts[i], step.k[i], step.v[i])
        assert np.abs(out[starts[i] : starts[i + 1]] - expected).max() < TOLERANCE


def test_a_row_without_keys_gives_zeros(monkeypatch) -> None:
    step = build(((0, 40), (0, 300)), ExtendGeometry(1, 4, 64, 64, 64))
    _, out = launch(monkeypatch, step, GluonTuning(), [0, 300])
    assert not out[:40].any()
    expected = step.row(0, 300, 40, step.k[1], step.v[1])
    assert np.abs(out[40:] - expected).max() < TOLERANCE
