"""Every GEMM worth timing and every other kernel of a step, compiled for every kind of GPU."""

import itertools
import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention.kernels.decode_shape import decode_shared_bytes
from attention.kernels.extend_shape import FOR_FEW_KEYS, FOR_SPLIT_KEYS, FOR_SPLIT_TREES
from benchmarks.h200.product_candidates import one_row_worth_trying, rounded_worth_trying
from tests.fakes.attention_targets import (
    DECODE_HEADS,
    EXTEND_HEADS,
    KINDS,
    NEW_TOKENS,
    decode_variants,
    extend_variant,
    join_variant,
    limits_of,
)
from tests.fakes.quantised_targets import (
    fp8_gemv_variant,
    fp8_variant,
    int4_mma_variant,
    int4_skinny_variant,
    quantised_variants,
)
from tests.fakes.sass import early_waits
from tests.fakes.triton_targets import (
    OTHERS,
    SHARED_BYTES,
    expert_adapter_variants,
    expert_variants,
    gemm_variant,
)
from tests.unit.workers.layers.cuda.test_other_gpus import fitting
from workers.layers.kept.int4 import HALF_HEADER, SCALES_HEADER
from workers.layers.quantised import tile_table
from workers.layers.quantised.skinny_shape import GemvTiles, MmaTiles
from workers.layers.quantised.tile_table import tiles_for

# Newer versions than the engine is tested with warn of a default that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def shared_bytes(capability, case):
    """(the case, what its kernel takes)."""
    return case, gemm_variant(*case).compile_for(capability).metadata.shared


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_every_candidate_fits(capability) -> None:
    distinct = {}
    for config, bucket in fitting(capability):
        variant = gemm_variant(config, bucket)
        distinct[repr((variant.types, variant.constants, variant.options))] = config, bucket
    assert len(distinct) > 20
    context = get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        for case, taken in processes.map(partial(shared_bytes, capability), distinct.values()):
            assert taken <= SHARED_BYTES[capability], case


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_products_of_experts_fit(capability) -> None:
    for variant in expert_variants(capability):
        taken = variant.compile_for(capability).metadata.shared
        assert taken <= SHARED_BYTES[capability], variant.constants


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_adapters_of_experts_fit(capability) -> None:
    """They have run on none of these."""
    for variant in expert_adapter_variants(capability):
        compiled = variant.compile_for(capability)
        assert compiled.metadata.shared <= SHARED_BYTES[capability], variant.constants
        if capability == (9, 0):
            check_waits_first(compiled.asm["ptx"])


def check_waits_first(ptx):
    """Nothing is read or written before the predecessor has ended."""
    wait = ptx.index("griddepcontrol.wait")
    assert not re.search(r"(ld|st)\.global|cp\.async", ptx[:wait])


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
def test_products_with_kept_weights_fit(capability) -> None:
    for variant in quantised_variants():
        taken = variant.compile_for(capability).metadata.shared
        assert taken <= SHARED_BYTES[capability], variant.constants


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("by_block", [False, True])
def test_rounded_products_take_weights_from_shared_memory(by_block, num_rows) -> None:
    """Both operands of every product are descriptors, and nothing turns FP8 into other numbers.
    Nothing that a sweep tries spills registers."""
    for tiles in rounded_worth_trying(num_rows, by_block):
        kernel = fp8_variant(tiles, by_block).compile_for((9, 0))
        assert kernel.metadata.shared <= SHARED_BYTES[9, 0], tiles
        ptx = kernel.asm["ptx"]
        # Accumulators in braces, then each operand: registers would be in braces, too.
        products = re.findall(r"wgmma\.mma_async\S+e4m3\.e4m3 \{[^}]*\}, (\S+), (\S+),", ptx)
        assert len(products) == ptx.count("wgmma.mma_async") > 0, tiles
        assert all(re.fullmatch(r"%rd\d+", one) for pair in products for one in pair), tiles
        assert "f16x2.e4m3x2" not in ptx
        assert kernel.asm["sass"].count("LDL") == 0, tiles


def check_fragments(ttgir):
    """A thread has the four numbers of its row of all that tensor cores are given."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)", ttgir, re.MULTILINE))
    products = [line for line in ttgir.splitlines() if "mma.sync" in line]
    assert products
    for line in products:
        taken = re.findall(r"tensor<\d+x4x\w+, (#\w+)>", line)
        assert len(taken) == 11
        for name in taken:
            assert "sizePerThread = [1, 4], threadsPerWarp = [32, 1]" in layouts[name]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ["fp8_rows", "fp8_blocks", "int4"])
def test_rows_times_kept_weights_stay_in_registers(name, is_gated) -> None:
    """Of all that a sweep tries; weights come by 16 bytes at once, and are multiplied as FP8's
    float16 or by tensor cores."""
    make = partial(fp8_gemv_variant, by_block=name == "fp8_blocks")
    if name == "int4":
        make = partial(int4_mma_variant, is_half=False)
    for tiles in one_row_worth_trying(name):
        if not isinstance(tiles, GemvTiles):
            continue
        kernel = make(tiles, is_gated).compile_for((9, 0))
        assert kernel.metadata.shared <= SHARED_BYTES[9, 0], tiles
        ptx, sass = kernel.asm["ptx"], kernel.asm["sass"]
        # Registers that are limited for one more program: Triton 3.6's ptxas spills 8, 3.9's 12.
        is_limited = isinstance(tiles, MmaTiles) and tiles.max_registers is not None
        assert sass.count("LDL") <= (12 if is_limited else 0), tiles
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], 0x10", ptx)
        # What the predecessor reads is not written before it has ended.
        assert -1 < ptx.find("griddepcontrol.wait") < ptx.find("st.global"), tiles
        if isinstance(tiles, MmaTiles):
            check_fragments(kernel.asm["ttgir"])
        else:
            assert "f16x2.e4m3x2" in ptx, tiles


@pytest.mark.timeout(600)
@pytest.mark.parametrize("header_words", [SCALES_HEADER, HALF_HEADER])
@pytest.mark.parametrize(
    "rows_and_columns",
    [(6144, 4096), (4096, 4096), (4096, 14336), (8192, 28672), (5120, 25600), (3584, 18944)],
)
def test_a_rows_weights_are_all_asked_for_before_one_is_waited_for(
    rows_and_columns, header_words
) -> None:
    """Of what the tables take: the first come while the predecessor runs. Where registers are
    limited assemblers spill some before that: of Llama-3.1-8B, for which the tables are, Triton
    3.9's two, 3.6's none; of down of larger models, whose turns leave two over, 3.9's six, 3.6's
    two."""
    plain = tiles_for(tile_table.INT4, 1, rows_and_columns[0])
    gated = tiles_for(tile_table.INT4_GATED, 1, 28672)
    kernels = [
        int4_mma_variant(plain, False, False, *rows_and_columns, header_words),
        int4_mma_variant(gated, True, False, header_words=header_words),
        fp8_gemv_variant(tiles_for(tile_table.FP8_ROWS, 1, 4096), False, False),
        fp8_gemv_variant(tiles_for(tile_table.FP8_GATED, 1, 28672), True, True),
    ]
    for kernel in kernels:
        waits = early_waits(kernel.compile_for((9, 0)).asm["sass"])
        assert [one for one, _ in waits if not one.startswith("STL")] == []
        assert len(waits) <= 6


def test_two_programs_of_64_rows_of_four_bits_fit_a_multiprocessor() -> None:
    """With 1 KiB that CUDA keeps of each."""
    tiles = tiles_for(tile_table.INT4, 64, 4096)
    for header_words in (SCALES_HEADER, HALF_HEADER):
        kernel = int4_skinny_variant(tiles, 256, header_words).compile_for((9, 0))
        assert 2 * (kernel.metadata.shared + 1024) <= SHARED_BYTES[9, 0] + 1024


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_what_a_step_launches_beside_gemms_fits(capability, name) -> None:
    assert OTHERS[name].compile_for(capability).metadata.shared <= SHARED_BYTES[capability]


def attention_bytes(capability, case):
    """(the case, what its extend kernel takes, what its launcher expects at most)."""
    heads, num_new, kind, preferred = case
    geometry, limits, is_tree = EXTEND_HEADS[heads], limits_of(capability), kind == "tree"
    tiles = geometry.tiles(num_new, limits, is_tree, preferred)
    compiled = extend_variant(geometry, tiles, kind).compile_for(capability)
    return case, compiled.metadata.shared, geometry.shared_bytes(tiles, limits, is_tree)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_every_extend_kernel_fits_what_its_launcher_expects(capability) -> None:
    cases = list(itertools.product(EXTEND_HEADS, NEW_TOKENS, KINDS, [()]))
    cases += itertools.product(
        EXTEND_HEADS, [1024], KINDS, [FOR_FEW_KEYS, FOR_SPLIT_KEYS, FOR_SPLIT_TREES]
    )
    context = get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        for case, taken, expected in processes.map(partial(attention_bytes, capability), cases):
            assert taken <= expected <= SHARED_BYTES[capability], case


@pytest.mark.parametrize("heads", EXTEND_HEADS)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_joining_parts_fits(capability, heads) -> None:
    compiled = join_variant(EXTEND_HEADS[heads]).compile_for(capability)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("heads", DECODE_HEADS)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_decode_kernels_fit_what_their_launcher_expects(capability, heads, num_rows) -> None:
    geometry = DECODE_HEADS[heads]
    tuning, plan, chunk = decode_variants(geometry, num_rows, capability)
    assert plan.compile_for(capability).metadata.shared <= SHARED_BYTES[capability]
    assert chunk.compile_for(capability).metadata.shared <= decode_shared_bytes(geometry, tuning)
