"""Products with quantised weights beside cuBLAS's with bfloat16, and how far from their floors.

    python3 -m benchmarks.h200.quantised_products [--rows 1 8 16 64 256 4096] [--formats fp8_rows]
    python3 -m benchmarks.h200.quantised_products --sweep [--rows 1 16 64 256] [--formats int4]

Weights are those of Llama-3.1-8B's layers, of one copy each way in turns, so that none is in the
cache. A line a matrix, format and number of rows: microseconds of bfloat16, of the product as
tile_table.py chooses it and of the way of many, speed-up over bfloat16, and the chosen one's share
of the floor: the longer of reading all bytes once and of multiplying at the peak of the tensor
cores that it uses. Last what a layer's four matrices take together.

--sweep: a line for each of the tiles that are worth trying, and the fastest last, of each matrix
and of a layer: what to write into tile_table.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.h200.attention_steps import graphed_seconds
from benchmarks.h200.product_candidates import (
    one_row_worth_trying,
    rounded_worth_trying,
    worth_trying,
)
from workers.layers.formats.grouped import GroupedWeight
from workers.layers.kept.fp8 import BLOCK, Fp8Blocks, Fp8Rows
from workers.layers.kept.int4 import Int4Groups
from workers.layers.kept.weight import KeptWeight
from workers.layers.quantised import tile_table
from workers.layers.quantised.fp8_products import Fp8BlockProduct, Fp8RowProduct
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.skinny_shape import GemvTiles
from workers.layers.quantised.tile_table import TileRule, TileTable

CUDA = torch.device("cuda", 0)
MATRICES = {
    "qkv": (6144, 4096, True),
    "o": (4096, 4096, True),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, True),
}
"""(out_features, in_features, whether its reader sums partial products up), on one rank."""
ROWS = (1, 8, 16, 64, 256, 4096)
GROUP_SIZE = 128
REPEATS = 20
BYTES_PER_S = 4.8e12
FLOPS = {"bf16": 989e12, "fp8": 1979e12}
"""Of an H200, dense, as NVIDIA gives them."""
MIN_BYTES = 256 << 20


def fp8_values(rows: int, columns: int) -> torch.Tensor:
    values = torch.randn(rows, columns, device=CUDA) * 64.0
    return values.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def fp8_rows(rows: int, columns: int) -> KeptWeight:
    return Fp8Rows(fp8_values(rows, columns), torch.rand(rows, device=CUDA) * 1e-3)


def fp8_blocks(rows: int, columns: int) -> KeptWeight:
    scales = torch.rand(rows // BLOCK, columns // BLOCK, device=CUDA) * 1e-3
    return Fp8Blocks(fp8_values(rows, columns), scales)


def int4(rows: int, columns: int) -> KeptWeight:
    shape = rows, columns // GROUP_SIZE
    weight = GroupedWeight(
        torch.randint(0, 16, (rows, columns), dtype=torch.int32, device=CUDA),
        (torch.rand(shape, device=CUDA) * 0.01).half().float(),
        torch.full(shape, 8, dtype=torch.int32, device=CUDA),
        torch.arange(columns, device=CUDA) // GROUP_SIZE,
    )
    kept = Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)
    if kept is None:
        raise SystemExit(f"{rows}x{columns} in groups of {GROUP_SIZE} is not kept")
    return kept


@dataclass(frozen=True, slots=True)
class Format:
    make: Callable[[int, int], KeptWeight]
    product: Callable[..., KeptProduct]
    """Of a kept weight, whether its reader sums parts up, and tiles."""
    table: TileTable


FORMATS = {
    "fp8_rows": Format(fp8_rows, Fp8RowProduct, tile_table.FP8_ROWS),
    "fp8_blocks": Format(fp8_blocks, Fp8BlockProduct, tile_table.FP8_BLOCKS),
    "int4": Format(int4, Int4Product, tile_table.INT4),
}
_MANY: TileTable = ()


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds."""

    bf16: float
    chosen: float
    many: float
    floor: float


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, all of them in turns in a graph."""

    def run() -> None:
        for call in calls:
            call()

    return graphed_seconds(run, REPEATS) / len(calls)


def kept_bytes(kept: KeptWeight) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in kept.buffers())


def floor_of(kept: KeptWeight, name: str, num_rows: int) -> float:
    tensor_cores = "bf16" if name == "int4" else "fp8"
    flops = 2.0 * num_rows * kept.out_features * kept.in_features
    activations = 2 * num_rows * (kept.out_features + kept.in_features)
    return max((kept_bytes(kept) + activations) / BYTES_PER_S, flops / FLOPS[tensor_cores])


def copies(kept: KeptWeight) -> int:
    return max(1, -(-MIN_BYTES // kept_bytes(kept)))


def weights_of(name: str, matrix: str) -> list[KeptWeight]:
    out_features, in_features, _ = MATRICES[matrix]
    first = FORMATS[name].make(out_features, in_features)
    others = range(copies(first) - 1)
    return [first, *(FORMATS[name].make(out_features, in_features) for _ in others)]


def by_table(
    name: str, matrix: str, weights: Sequence[KeptWeight], x: torch.Tensor, table: TileTable
) -> float:
    products = [FORMATS[name].product(kept, MATRICES[matrix][2], table) for kept in weights]
    return seconds([partial(product, x) for product in products])


def bf16_seconds(matrix: str, x: torch.Tensor) -> float:
    out_features, in_features, _ = MATRICES[matrix]
    plain = [torch.randn(out_features, in_features, device=CUDA).bfloat16() for _ in range(4)]
    return seconds([partial(torch.mm, x, weight.t()) for weight in plain])


def inputs_of(matrix: str, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, MATRICES[matrix][1], device=CUDA).bfloat16()


def timed(name: str, matrix: str, num_rows: int) -> Timed:
    weights, x, table = weights_of(name, matrix), inputs_of(matrix, num_rows), FORMATS[name].table
    return Timed(
        bf16=bf16_seconds(matrix, x),
        chosen=by_table(name, matrix, weights, x, table),
        many=by_table(name, matrix, weights, x, _MANY),
        floor=floor_of(weights[0], name, num_rows),
    )


def show(name: str, num_rows: int) -> None:
    found = {matrix: timed(name, matrix, num_rows) for matrix in MATRICES}
    for matrix, one in found.items():
        print(
            f"{name:10} {matrix:8} rows {num_rows:5} bf16 {one.bf16 * 1e6:7.1f} "
            f"chosen {one.chosen * 1e6:7.1f} many {one.many * 1e6:7.1f} "
            f"x{one.bf16 / one.chosen:.2f} of the floor {one.floor / one.chosen:.0%}"
        )
    bf16, chosen = (
        sum(getattr(one, kind) for one in found.values()) for kind in ("bf16", "chosen")
    )
    print(
        f"{name:10} layer    rows {num_rows:5} bf16 {bf16 * 1e6:7.1f} "
        f"chosen {chosen * 1e6:7.1f} x{bf16 / chosen:.2f}",
        flush=True,
    )


def tables_to_try(name: str, num_rows: int) -> list[TileTable]:
    """The way of many, the table as it is, and one of a single rule for each tiles."""
    if name == "int4":
        tiles = worth_trying(num_rows, GROUP_SIZE)
    else:
        tiles = rounded_worth_trying(num_rows, name == "fp8_blocks")
    if num_rows == 1:
        tiles += [one for one in one_row_worth_trying(name) if isinstance(one, GemvTiles)]
    return [_MANY, FORMATS[name].table, *((TileRule(num_rows, one),) for one in tiles)]


def way_of(table: TileTable) -> str:
    return str(table[0].tiles) if len(table) == 1 else "as the table has it" if table else "many"


def sweep(name: str, num_rows: int) -> None:
    weights = {matrix: weights_of(name, matrix) for matrix in MATRICES}
    inputs = {matrix: inputs_of(matrix, num_rows) for matrix in MATRICES}
    bf16 = {matrix: bf16_seconds(matrix, inputs[matrix]) for matrix in MATRICES}
    found: dict[TileTable, dict[str, float]] = {}
    for table in tables_to_try(name, num_rows):
        way = way_of(table)
        try:
            each = {
                matrix: by_table(name, matrix, weights[matrix], inputs[matrix], table)
                for matrix in MATRICES
            }
        except OutOfResources as error:
            print(f"sweep {name} rows {num_rows} {way}: {error}", flush=True)
            continue
        found[table] = each
        shown = " ".join(f"{matrix} {one * 1e6:.1f}" for matrix, one in each.items())
        print(f"sweep {name} rows {num_rows} {way}: {shown} layer {layer(each) * 1e6:.1f}")
    show_best(f"best {name} rows {num_rows}", bf16, found)


def layer(each: Mapping[str, float]) -> float:
    return sum(each.values())


def show_best(
    title: str, bf16: Mapping[str, float], found: Mapping[TileTable, Mapping[str, float]]
) -> None:
    """Of each matrix, as rules by output features want, and of a layer with one rule."""
    for matrix in MATRICES:
        for table in sorted(found, key=lambda one: found[one][matrix])[:2]:
            taken = found[table][matrix]
            print(
                f"{title} {matrix} bf16 {bf16[matrix] * 1e6:.1f} {taken * 1e6:.1f} "
                f"x{bf16[matrix] / taken:.2f} {way_of(table)}"
            )
    for table in sorted(found, key=lambda one: layer(found[one]))[:4]:
        taken = layer(found[table])
        print(
            f"{title} layer bf16 {layer(bf16) * 1e6:.1f} {taken * 1e6:.1f} "
            f"x{layer(bf16) / taken:.2f} {way_of(table)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(CUDA))
    for name in arguments.formats:
        for num_rows in arguments.rows:
            if arguments.sweep:
                sweep(name, num_rows)
            else:
                show(name, num_rows)


if __name__ == "__main__":
    main()
