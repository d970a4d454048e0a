"""The kernels of kept weights, as triton_targets.py has others."""

import triton

from tests.fakes.triton_targets import EXPERTS, Variant
from workers.layers.kept import stacks
from workers.layers.kept.int4 import FLOAT_HEADER, HALF_HEADER, SCALES_HEADER, Int4Groups
from workers.layers.quantised import (
    expert_fp8,
    expert_products,
    expert_rows,
    expert_splits,
    expert_spread,
    fp8_gemv,
    fp8_mapped,
    fp8_rounded,
    fp8_rounding,
    int4_mma,
    int4_skinny,
    int4_spread,
    tile_table,
)
from workers.layers.quantised import expert_gemm as quantised_experts
from workers.layers.quantised.skinny_shape import GemvTiles, MappedSkinnyTiles

_INT4_TABLES = tile_table.INT4, tile_table.INT4_GATED
_INT4 = {"x": "*bf16", "words": "*i32", "headers": "*i32", "out": "*fp32"}


def quantised_variants():
    """Products with kept weights, as a GPU from sm90 on launches them."""
    kept = {"x": "*bf16", "scales": "*fp32", "out": "*fp32"}
    fp8 = {**kept, "values": "*fp8e4nv", "num_columns": "i32"}
    for by_block, table in ((True, tile_table.FP8_BLOCKS), (False, tile_table.FP8_ROWS)):
        for tiles in {rule.tiles for rule in table if rule.tiles is not None}:
            if not isinstance(tiles, GemvTiles):
                yield fp8_variant(tiles, by_block)
    yield from _gemv_variants()
    for rule in tile_table.INT4:
        if isinstance(rule.tiles, GemvTiles):
            continue
        for turn in (128, 256):
            for header_words in (SCALES_HEADER, HALF_HEADER, FLOAT_HEADER):
                yield int4_skinny_variant(rule.tiles, turn, header_words)
    groups = {"GROUP_SIZE": 128, "GROUPS": 16, "BLOCK": 128}
    rows = {"GROUP_SIZE": 14336, "GROUPS": 1, "BLOCK": 16384}
    for constants in (groups, rows):
        yield Variant(fp8_rounding._round_groups_kernel, fp8, constants, {"num_warps": 8})
    yield from _kept_expert_variants()
    spread = {"HEADER_WORDS": HALF_HEADER, "TURN": 256, "BLOCK_ROWS": 32, "IS_PACKED": True}
    matrix = {**_INT4, "out": "*bf16"}
    yield Variant(int4_spread._int4_spread_kernel, matrix, spread, {"num_warps": 4})


def int4_skinny_variant(tiles, turn, header_words):
    """header_words: words of a header, as Int4Groups has them."""
    tile, options = _skinny_tile(tiles)
    constants = {"TURN": turn, "IS_PACKED": True, "NUM_LINES": 8, "HEADER_WORDS": header_words}
    return Variant(int4_skinny._int4_skinny_kernel, _INT4, tile | constants, options)


def fp8_variant(tiles, by_block):
    """The kernel for few rows of FP8 weights that the class of tiles says."""
    types = {"x": "*bf16", "scales": "*fp32", "out": "*fp32"}
    types |= {"words": "*i32", "values": "*fp8e4nv"}
    tile, options = _skinny_tile(tiles)
    constants = {**tile, "BY_BLOCK": by_block, "BLOCK_K": tiles.block_k, "NUM_LINES": 4}
    if isinstance(tiles, MappedSkinnyTiles):
        types["x_map"] = f"tensordesc<bf16[{tiles.block_tokens}, {tiles.block_k}]>"
        types["values_map"] = f"tensordesc<fp8e4nv[{tiles.block_rows}, {tiles.block_k}]>"
        return Variant(fp8_mapped._fp8_mapped_kernel, types, constants, options)
    return Variant(fp8_rounded._fp8_rounded_kernel, types, constants, options)


def _gemv_variants():
    """Products with one row of x, and the activations of gated blocks."""
    fp8 = tile_table.FP8_ROWS + tile_table.FP8_BLOCKS, tile_table.FP8_GATED
    for make, tables in ((fp8_gemv_variant, fp8), (int4_mma_variant, _INT4_TABLES)):
        for is_gated, table in zip((False, True), tables, strict=True):
            for tiles in {rule.tiles for rule in table if isinstance(rule.tiles, GemvTiles)}:
                yield make(tiles, is_gated, False)
                yield make(tiles, is_gated, True)


def fp8_gemv_variant(tiles, is_gated, by_block):
    types = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
    constants = {"BY_BLOCK": by_block, **_gemv_constants(tiles, is_gated)}
    types["out"] = "*bf16" if is_gated else "*fp32"
    return Variant(fp8_gemv._fp8_gemv_kernel, types, constants, {"num_warps": tiles.num_warps})


def int4_mma_variant(tiles, is_gated, is_half, rows=28672, columns=4096, header_words=HALF_HEADER):
    """Of groups of 128, each program having all columns where the activation is made. is_half: x of
    float16. header_words: as Int4Groups has them."""
    x = "*fp16" if is_half else "*bf16"
    types = {"x": x, "words": "*i32", "headers": "*i32"}
    kept = Int4Groups.unread(rows, columns, columns // 128, has_order=False)
    shape = tiles.of(rows, columns, kept.turn, 1, can_split=not is_gated)
    types["out"] = x if shape.num_splits == 1 else "*fp32"
    compiled_for = int4_mma.mma_shape(kept, shape, is_gated)._replace(header_words=header_words)
    constants = {"shape": compiled_for, "IS_GELU": False, "IS_PACKED": True}
    options = {"num_warps": compiled_for.warps, "maxnreg": tiles.max_registers}
    return Variant(int4_mma._int4_mma_kernel, types, constants, options)


def _gemv_constants(tiles, is_gated):
    sizes = {"BLOCK_ROWS": tiles.block_rows, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages}
    return {**sizes, "IS_GATED": is_gated, "IS_GELU": False}


def _skinny_tile(tiles):
    tile = {"BLOCK_TOKENS": tiles.block_tokens, "BLOCK_ROWS": tiles.block_rows}
    return tile, {"num_stages": tiles.num_stages, "num_warps": tiles.num_warps}


def _kept_expert_variants():
    """MXFP4 of gpt-oss' sizes, FP8 of Qwen3-30B-A3B's."""
    for stack, table in expert_products.TABLES.items():
        for _, one in table:
            way = one.others if isinstance(one, expert_products.OnWarpgroups) else one
            if isinstance(way, expert_products.AsKept):
                yield from _kept_expert_products(way.tiles, stack is stacks.Fp4Stack)
            elif isinstance(way, expert_fp8.RoundedTiles):
                yield from _rounded_expert_products(way)
        one = expert_splits.SplitShape(64, 4, 4, 4)
        tiles = [way.tiles for _, way in table if isinstance(way, expert_products.InSplits)]
        for split in (*tiles, expert_splits.SplitTiles(16, one, one)):
            yield from _split_expert_products(split, stack is stacks.Fp4Stack)
    yield from _expert_rows_variants()
    sizes = dict.fromkeys(("num_rows", "num_columns", "num_turns"), "i32")
    rows, options = {"BLOCK_ROWS": 64}, {"num_warps": 4}
    fp4 = {**sizes, "words": "*i32", "scales": "*i32", "out": "*bf16"}
    yield Variant(expert_spread._fp4_spread_kernel, fp4, {**rows, "IS_PACKED": True}, options)
    fp8 = {**sizes, "values": "*fp8e4nv", "scales": "*fp32", "out": "*bf16"}
    yield Variant(expert_spread._fp8_spread_kernel, fp8, rows, options)


def _expert_rows_variants():
    """Of Qwen3-30B-A3B: what is launched around products that take rows by expert."""
    types = {**EXPERTS, "values": "*fp8e4nv", "scales": "*fp32"}
    places = {"NUM_EXPERTS": 128, "NUM_COLUMNS": 2048, "NUM_CHOSEN": 8}
    places |= {"NUM_HERE": 128, "EXPERTS": 128, "GROUPS": 16, "ROWS": 128}
    yield Variant(expert_rows._place_rows_kernel, types, places, {"num_warps": 4})


def _rounded_expert_products(tiles):
    types = {**EXPERTS, **dict.fromkeys(("x", "gate_up", "down"), "*fp8e4nv")}
    types |= dict.fromkeys(("scales", "x_scales", "out_scales"), "*fp32")
    constants = {"NUM_CHOSEN": 8, "ROWS": tiles.block_rows, "GROUP": 12}
    options = {"num_stages": tiles.num_stages, "num_warps": tiles.num_warps}
    gate = {"DEPTH_SIZE": 2048, "WIDTH": 768, "ALPHA": 1.0, "LIMIT": 0.0}
    gate["DTYPE"] = triton.language.bfloat16
    activated = {**types, "out": "*fp8e4nv"}
    yield Variant(expert_fp8._activate_kernel, activated, constants | gate, options)
    down = {"DEPTH_SIZE": 768, "WIDTH": 2048}
    yield Variant(expert_fp8._project_kernel, types, constants | down, options)


def _kept_expert_products(one, is_fp4):
    yield _kept_product(quantised_experts._activate_kernel, one, is_fp4, {})
    yield _kept_product(quantised_experts._project_kernel, one, is_fp4, {"NUM_SPLITS": 1})


def _split_expert_products(tiles, is_fp4):
    kernels = expert_splits._activate_kernel, quantised_experts._project_kernel
    for kernel, shape in zip(kernels, (tiles.gate_up, tiles.down), strict=True):
        more = {"NUM_SPLITS": shape.num_splits}
        yield _kept_product(kernel, tiles.tiles_of(shape), is_fp4, more)


def _kept_product(kernel, one, is_fp4, more):
    width, hidden = (2880, 2880) if is_fp4 else (768, 2048)
    types = {**EXPERTS, "gate_up": "*i32", "down": "*i32"}
    types |= {"scales": "*i32" if is_fp4 else "*fp32", "partials": "*fp32", "counters": "*i32"}
    sizes = {"DEPTH_SIZE": hidden, "WIDTH": width, "ALPHA": 1.0, "LIMIT": 7.0}
    if kernel is quantised_experts._project_kernel:
        sizes = {"DEPTH_SIZE": width, "WIDTH": hidden}
    constants = {"NUM_CHOSEN": 4, "HAS_BIAS": is_fp4, "IS_FP4": is_fp4, "IS_PACKED": True}
    constants |= {"ROWS": one.block_rows, "COLUMNS": one.columns, "GROUP": 12, **sizes, **more}
    options = {"num_stages": one.num_stages, "num_warps": one.num_warps}
    return Variant(kernel, types, constants, options)
