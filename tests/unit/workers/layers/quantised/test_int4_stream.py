"""The Gluon product of one row and four-bit weights by threads: places, groups that are waited for,
blocks that programs share out and gates.

What compilers and tensor cores make of it is for tests/gpu/workers/test_kept_streams.py.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="comes with Triton from 3.4 on")

from tests.fakes import int4_stream_by_threads
from tests.fakes.int4_stream_by_threads import Pointer
from tests.fakes.interpreted_quantised import int4_weight
from workers.layers.kept.int4 import Int4Groups
from workers.layers.quantised.int4_stream import int4_stream, stream_shape
from workers.layers.quantised.skinny_shape import StreamedShape, StreamTiles

TOLERANCE = 1e-5
AT_ONCE = 1 << 10


def kept_of(rows, columns, group_size):
    weight = int4_weight(rows, columns, group_size, False)
    return Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)


def multiply(monkeypatch, kept, tiles, is_gated, num_programs):
    """The product of a row of numbers of bfloat16, and that row."""
    shape = tiles.of(kept.out_features, kept.in_features, kept.turn, 1, can_split=True)
    compiled_for = stream_shape(kept, shape, is_gated, num_programs)
    x = torch.randn(kept.in_features).bfloat16()
    features = kept.out_features // 2 if is_gated else kept.out_features
    out = np.full(features, np.nan, np.float32)
    tensors = kept.words.flatten(), kept.zeros.flatten(), kept.scales.flatten()
    arguments = (
        Pointer(x.view(torch.int32).numpy()),
        *(Pointer(tensor.numpy()) for tensor in tensors),
        *(Pointer(out), compiled_for, False, True),
    )
    int4_stream_by_threads.run(monkeypatch, arguments, num_programs)
    return torch.from_numpy(out).double(), x.double()


def check_close(got, want):
    assert float((got - want).norm() / want.norm()) < TOLERANCE


@pytest.mark.parametrize("num_programs", [1, 3, 16])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "tiles"),
    [
        (80, 1024, 128, StreamTiles(16, 1, 512, 1, 3, 2)),
        (80, 1024, 128, StreamTiles(32, 1, 512, 1, 9, 2, early_steps=1)),
        (88, 1792, 256, StreamTiles(48, 1, 2048, 1, 2, 8, early_steps=AT_ONCE)),
        (48, 1024, 1024, StreamTiles(16, 1, 1024, 1, 4, 4, early_steps=2)),
        (24, 384, 64, StreamTiles(16, 1, 128, 1, 2, 1)),
    ],
)
def test_programs_have_all_rows(
    monkeypatch, rows, columns, group_size, tiles, num_programs
) -> None:
    torch.manual_seed(rows)
    kept = kept_of(rows, columns, group_size)
    got, x = multiply(monkeypatch, kept, tiles, False, num_programs)
    check_close(got, kept.dequantised().double() @ x)


@pytest.mark.parametrize("num_programs", [1, 2, 7])
@pytest.mark.parametrize(
    "tiles", [StreamTiles(16, 1, 256, 1, 3, 1), StreamTiles(32, 1, 512, 1, 5, 2)]
)
def test_gates_meet_their_projections(monkeypatch, tiles, num_programs) -> None:
    torch.manual_seed(1)
    kept = kept_of(80, 512, 128)
    got, x = multiply(monkeypatch, kept, tiles, True, num_programs)
    gate, up = (kept.dequantised().double() @ x).chunk(2)
    check_close(got, torch.nn.functional.silu(gate) * up)


def test_rooms_are_no_more_than_a_programs_steps() -> None:
    kept = Int4Groups.unread(4096, 4096, 32, has_order=False)
    tiles = StreamTiles(16, 1, 2048, 1, num_stages=12, num_warps=8)
    shape = tiles.of(4096, 4096, kept.turn, 1, can_split=True)
    assert shape.num_splits == 1
    made = stream_shape(kept, shape, is_gated=False, num_programs=132)
    assert (made.blocks, made.steps, made.warps) == (256, 2, 8)
    assert made.stages == 5


@pytest.mark.parametrize(("rows", "is_gated"), [(20, False), (24, True), (8, False)])
def test_rows_without_whole_tiles_are_refused(rows, is_gated) -> None:
    kept = Int4Groups.unread(rows, 256, 2, has_order=False)
    shape = StreamedShape(16, 1, 256, 1, 2, 1)
    with pytest.raises(ValueError, match="whole tiles"):
        stream_shape(kept, shape, is_gated, 1)


def test_what_is_copied_by_sixteen_bytes_begins_there() -> None:
    kept = kept_of(16, 256, 128)
    x = torch.zeros(1, 257, dtype=torch.bfloat16)[:, 1:]
    with pytest.raises(ValueError, match="16 bytes"):
        int4_stream(x, kept, StreamedShape(16, 1, 256, 1, 2, 1))


@pytest.mark.parametrize(
    "tiles", [(16, 1, 512, 1, 1, 2), (8, 1, 512, 1, 3, 2), (24, 1, 512, 1, 3, 2)]
)
def test_rings_that_cannot_run_ahead_and_broken_tiles_are_refused(tiles) -> None:
    """With one step a program would wait for no copy of what it multiplies."""
    kept = kept_of(80, 1024, 128)
    shape = StreamTiles(*tiles).of(80, 1024, kept.turn, 1, can_split=True)
    with pytest.raises(ValueError, match="2 steps or more of a multiple of 16"):
        stream_shape(kept, shape, False, 4)
