"""Which tiles the products of experts take, and by which way their weights come."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.triton_targets import SHARED_BYTES, expert_variant
from workers.layers.cuda.expert_maps import MappedTiles
from workers.layers.cuda.expert_tiles import BY_MAPS, BY_POINTERS, table_for, tiles_for
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits
from workers.layers.routed_experts import SILU, RoutedWeights

# Newer versions than the engine is tested with warn of a default that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
SMALL = DeviceLimits.within((12, 0), SHARED_BYTES[12, 0])


def experts_of(hidden, width):
    return RoutedWeights(torch.empty(2, 2 * width, hidden), torch.empty(2, hidden, width), SILU)


@pytest.mark.parametrize(("hidden", "width"), [(2880, 2880), (2048, 1408), (2048, 768), (72, 96)])
def test_maps_are_for_gpus_with_a_copy_engine(hidden, width) -> None:
    experts = experts_of(hidden, width)
    assert table_for(experts, HOPPER) is BY_MAPS
    assert table_for(experts, DeviceLimits((8, 9), HOPPER.shared_bytes)) is BY_POINTERS


@pytest.mark.parametrize(("hidden", "width"), [(2048, 100), (100, 2048)])
def test_rows_that_begin_anywhere_go_by_pointers(hidden, width) -> None:
    assert table_for(experts_of(hidden, width), HOPPER) is BY_POINTERS


@pytest.mark.parametrize("table", [BY_MAPS, BY_POINTERS], ids=["maps", "pointers"])
@pytest.mark.parametrize("num_pairs", [1, 8, 66, 500, 1024, 2048, 8192, 1 << 20])
def test_both_products_share_their_blocks(table, num_pairs) -> None:
    activate, project = tiles_for(table, num_pairs, 64, HOPPER.shared_bytes)
    assert activate.block_rows == project.block_rows


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "block_rows"),
    [(256 * 4, 32, 64), (256 * 8, 66, 32), (256 * 8, 128, 32), (64 * 4, 32, 16)],
    ids=["gpt_oss", "deepseek", "qwen3", "gpt_oss_64"],
)
def test_blocks_are_larger_than_the_average(num_pairs, num_experts, block_rows) -> None:
    activate, _ = tiles_for(BY_MAPS, num_pairs, num_experts, HOPPER.shared_bytes)
    assert activate.block_rows == block_rows


def test_stages_are_as_many_as_fit() -> None:
    for limits in (HOPPER, SMALL):
        for most, whole in BY_MAPS:
            both = tiles_for(BY_MAPS, int(64 * min(most, 1000)), 64, limits.shared_bytes)
            for tiles, own in zip(both, whole, strict=True):
                assert 2 <= tiles.num_stages <= own.num_stages
                assert limits is SMALL or tiles == own


@pytest.mark.parametrize("product", ["activate", "project"])
def test_mapped_products_compile_for_hopper(product) -> None:
    """The largest of each, with biases and a limit; the others in tests/nightly."""
    tiles = BY_MAPS[-1][1][product == "project"]
    assert isinstance(tiles, MappedTiles)
    compiled = expert_variant(tiles, product, 2880, 2880, has_bias=True).compile_for((9, 0))
    assert compiled.metadata.shared <= SHARED_BYTES[9, 0]
    assert "wgmma" in compiled.asm["ptx"]
