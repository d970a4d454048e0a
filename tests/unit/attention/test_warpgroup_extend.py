"""Which prompts the Gluon kernel takes, and that the plain one has all others."""

from types import SimpleNamespace

import pytest
import torch

from attention.capability import BackendProbe
from attention.kernels import paged_extend, warpgroup_extend
from attention.kernels.extend_shape import FEW_KEYS, FOR_FEW_KEYS, FOR_SPLIT_KEYS, ExtendGeometry
from attention.kernels.gluon_shape import TILE_ROWS, GluonTuning, covers, gluon_shape
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_decode import ScoreRule
from attention.kernels.paged_extend import ExtendRows, PagedExtend, PagedKeys, SeenKeys
from attention.kernels.warpgroup_extend import WarpgroupExtend, make_extend
from attention.visibility import CAUSAL, Everything, Tree

HOPPER = GpuLimits((9, 0), 132, 227 << 10)
AMPERE = GpuLimits((8, 0), 108, 163 << 10)
LLAMA = ExtendGeometry(8, 4, 128, 128, 64)
TUNING = GluonTuning()
PLAIN_RULE = ScoreRule(0.1, 0.0, None)


class Launches:
    """As a kernel: kernel[grid](..., shape=shape)."""

    def __init__(self):
        self.grids = []
        self.shapes = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, shape, **__: self.shapes.append(shape)


@pytest.fixture
def kernels(monkeypatch):
    """What is launched in place of the plain kernel and of Gluon's."""
    plain, gluon = Launches(), Launches()
    extend = SimpleNamespace(attend_extend=plain, join_splits=Launches())
    described = SimpleNamespace(attend=gluon, describe=lambda pages, keys: (pages.shape, keys))
    monkeypatch.setattr(paged_extend, "load_extend_kernels", lambda: extend)
    monkeypatch.setattr(warpgroup_extend, "load_gluon_extend", lambda: described)
    monkeypatch.setattr(warpgroup_extend, "probe_gluon", lambda: BackendProbe(is_available=True))
    return SimpleNamespace(plain=plain, gluon=gluon)


@pytest.mark.parametrize(
    ("geometry", "dtype", "limits"),
    [
        (LLAMA, torch.bfloat16, AMPERE),
        (LLAMA, torch.float32, HOPPER),
        (ExtendGeometry(8, 4, 128, 128, 1), torch.bfloat16, HOPPER),
        (ExtendGeometry(8, 4, 128, 128, 24), torch.bfloat16, HOPPER),
        (ExtendGeometry(8, 4, 96, 96, 64), torch.bfloat16, HOPPER),
        (ExtendGeometry(8, 4, 128, 64, 64), torch.bfloat16, HOPPER),
        (ExtendGeometry(8, 4, 128, 128, 64, is_e4m3=True), torch.bfloat16, HOPPER),
        (ExtendGeometry(1, 16, 128, 128, 64, rope_dim=64), torch.bfloat16, HOPPER),
    ],
)
def test_other_heads_pages_and_gpus_keep_the_plain_kernel(geometry, dtype, limits) -> None:
    assert not covers(geometry, dtype, limits)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("tuning", [TUNING, GluonTuning(64, 4)])
def test_a_copy_has_one_page_and_a_program_fits(page_size, tuning) -> None:
    geometry = ExtendGeometry(8, 4, 128, 128, page_size)
    assert covers(geometry, torch.bfloat16, HOPPER)
    shape = gluon_shape(geometry, tuning)
    assert shape.block_keys % shape.box_keys == 0
    assert page_size % shape.box_keys == 0
    # Queries and the blocks of K and V on their way, of two bytes; barriers beside them.
    num_rows = TILE_ROWS + 2 * shape.num_stages * shape.block_keys
    assert num_rows * shape.head_dim * 2 + 3072 <= HOPPER.shared_bytes


def test_without_a_tuning_every_prompt_takes_the_plain_kernel(kernels, monkeypatch) -> None:
    monkeypatch.setattr(warpgroup_extend, "TUNING", None)
    assert type(make_extend(LLAMA, torch.bfloat16, HOPPER)) is PagedExtend


def test_another_triton_is_said_and_takes_the_plain_kernel(kernels, monkeypatch, caplog) -> None:
    monkeypatch.setattr(warpgroup_extend, "TUNING", TUNING)
    assert type(make_extend(LLAMA, torch.bfloat16, HOPPER)) is WarpgroupExtend
    other = BackendProbe(is_available=False, missing="this is 9.9")
    monkeypatch.setattr(warpgroup_extend, "probe_gluon", lambda: other)
    with caplog.at_level("INFO"):
        assert type(make_extend(LLAMA, torch.bfloat16, HOPPER)) is PagedExtend
    assert "this is 9.9" in caplog.text


def attend(num_rows, num_new, prefix=0, window=-1, visibility=CAUSAL, rule=PLAIN_RULE) -> None:
    extend = WarpgroupExtend(LLAMA, HOPPER, TUNING)
    num_tokens = num_rows * num_new
    q, positions = torch.empty(num_tokens, 32, 128), torch.arange(num_tokens)
    pages = torch.empty(2, 64, 8, 128)
    cumulative = torch.arange(num_rows + 1, dtype=torch.int32) * num_new
    num_keys = prefix + num_new
    lengths = torch.full((num_rows,), num_keys, dtype=torch.int32)
    table = torch.zeros(num_rows, 4, dtype=torch.int32)
    rows = ExtendRows(cumulative, lengths, table, num_new, num_keys)
    seen = SeenKeys(visibility, window, positions)
    extend.attend(q, PagedKeys(pages, pages), rows, seen, rule, torch.empty_like(q))


def test_many_tokens_of_plain_layers_take_warpgroups(kernels) -> None:
    attend(8, 1024)
    assert kernels.gluon.grids == [(8, 8 * 1024 * 4 // 128 + 8)]
    assert not kernels.plain.grids


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 24},
        {"visibility": Everything()},
        {"rule": ScoreRule(0.1, 30.0, None)},
        {"rule": ScoreRule(0.1, 0.0, torch.zeros(32))},
        {"num_new": 16, "num_rows": 64},
        {"num_rows": 1, "num_new": 256, "prefix": 4096},
    ],
    ids=["window", "everything", "cap", "sinks", "short rows", "few tiles"],
)
def test_everything_else_takes_the_plain_kernel(kernels, changes) -> None:
    attend(**({"num_rows": 8, "num_new": 1024} | changes))
    assert kernels.plain.grids
    assert not kernels.gluon.grids


def test_rows_with_few_keys_take_small_tiles(kernels) -> None:
    attend(64, 100)
    attend(32, FEW_KEYS)
    rows, keys = FOR_FEW_KEYS[0].tile_rows, FOR_FEW_KEYS[0].block_keys
    assert [(one.tile_rows, one.block_keys) for one in kernels.plain.shapes] == [(rows, keys)] * 2
    assert kernels.plain.grids[0] == (64 * 100 * 4 // rows + 64, 8, 1)
    assert not kernels.gluon.grids
    attend(32, FEW_KEYS + 1)
    assert len(kernels.gluon.grids) == 1


def test_programs_that_share_keys_have_smaller_tiles(kernels) -> None:
    attend(1, 100, prefix=3000)
    (shape,), (grid,) = kernels.plain.shapes, kernels.plain.grids
    tiles = FOR_SPLIT_KEYS[0]
    assert (shape.tile_rows, shape.block_keys, shape.is_split) == (tiles.tile_rows, 64, True)
    # Tiles of 64 pairs of 8 heads, each shared by as many programs as two a multiprocessor allow.
    assert grid == (100 * 4 // 64 + 1, 8, 2 * 132 // (7 * 8))


def test_trees_of_few_rows_have_smaller_tiles_still(kernels) -> None:
    """Where at least four programs share a tile's keys."""
    starts, mask = torch.arange(8, dtype=torch.int32) * 17**2, torch.ones(8 * 17**2).bool()
    for num_rows, tile_rows in ((1, 32), (2, 32), (4, 64)):
        attend(num_rows, 17, prefix=8000, visibility=Tree(mask, starts[:num_rows]))
        assert kernels.plain.shapes[-1].tile_rows == tile_rows
        assert kernels.plain.shapes[-1].is_split
    (small, *_, wide) = kernels.plain.grids
    assert small == (17 * 4 // 32 + 1, 8, 2 * 132 // (3 * 8))
    assert wide == (4 * 17 * 4 // 64 + 4, 8, 2 * 132 // (8 * 8))


def test_preferred_tiles_that_do_not_fit_are_passed_over() -> None:
    small = GpuLimits((8, 6), 80, 64 << 10)
    assert LLAMA.tiles(100, small, preferred=FOR_SPLIT_KEYS) == LLAMA.tiles(100, small)
    assert LLAMA.tiles(1, HOPPER, preferred=FOR_FEW_KEYS) == LLAMA.tiles(1, HOPPER)
