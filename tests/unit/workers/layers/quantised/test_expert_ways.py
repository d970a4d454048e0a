"""Which experts' products go by warpgroups, and which way the others go."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention.capability import BackendProbe
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised import expert_products, warpgroup_limits
from workers.layers.quantised.expert_products import TABLES, OnWarpgroups
from workers.layers.quantised.expert_warpgroups import Fp8WarpgroupTiles
from workers.layers.quantised.fp4_experts import Fp4WarpgroupTiles
from workers.layers.routed_experts import SILU

META = torch.device("meta")
FP8, FP4 = Fp8WarpgroupTiles(4), Fp4WarpgroupTiles(256, 3, 5)
BLACKWELL = DeviceLimits.within((10, 0), 227 << 10)


def kept(stack, hidden_size, width, has_bias=False):
    bias = torch.empty(2, hidden_size) if has_bias else None
    stacks = stack(2, 2 * width, hidden_size, META), stack(2, hidden_size, width, META)
    return KeptExperts(*stacks, SILU, bias, bias)


@pytest.mark.parametrize(
    ("tiles", "experts", "is_covered"),
    [
        (FP8, kept(Fp8Stack, 2048, 768), True),
        (FP8, kept(Fp8Stack, 2048, 128), True),
        (FP8, kept(Fp8Stack, 1920, 768), False),
        (FP8, kept(Fp8Stack, 2048, 768, has_bias=True), False),
        (FP4, kept(Fp4Stack, 2880, 2880, has_bias=True), True),
        (FP4, kept(Fp4Stack, 2880, 360), True),
        (FP4, kept(Fp4Stack, 2880, 180), False),
        (FP4, kept(Fp4Stack, 2884, 2880), False),
    ],
)
def test_sizes_that_warpgroups_cover(tiles, experts, is_covered) -> None:
    assert tiles.covers(experts) == is_covered


def named(name):
    return SimpleNamespace(products=lambda *arguments: (name, arguments[-1]))


@pytest.mark.parametrize(
    ("limits", "has_gluon", "is_on_gpu", "covers", "taken"),
    [
        (HOPPER, True, True, True, "warpgroups"),
        (HOPPER, True, True, False, "others"),
        (HOPPER, True, False, True, "others"),
        (HOPPER, False, True, True, "others"),
        (BLACKWELL, True, True, True, "others"),
    ],
)
def test_what_they_do_not_cover_goes_as_before(
    monkeypatch, limits, has_gluon, is_on_gpu, covers, taken
) -> None:
    probe = BackendProbe(is_available=has_gluon)
    monkeypatch.setattr(warpgroup_limits, "probe_gluon", lambda: probe)
    of = SimpleNamespace(of=lambda device: limits)
    monkeypatch.setattr(expert_products, "DeviceLimits", of)
    tiles = named("warpgroups")
    tiles.covers = lambda experts: covers
    hidden = SimpleNamespace(is_cuda=is_on_gpu, device=META)
    way = OnWarpgroups(tiles, named("others"))
    assert way.products(hidden, None, kept(Fp4Stack, 64, 64), 2) == (taken, 2)


def goes_by_warpgroups(stack, rows) -> bool:
    """Whether the table says so of so many rows an expert."""
    return isinstance(next(way for most, way in TABLES[stack] if rows <= most), OnWarpgroups)


def test_many_rows_go_by_warpgroups() -> None:
    assert [goes_by_warpgroups(Fp8Stack, rows) for rows in (1, 8, 9, 512)] == [0, 0, 1, 1]
    assert [goes_by_warpgroups(Fp4Stack, rows) for rows in (1, 47, 48, 512)] == [0, 0, 1, 1]
