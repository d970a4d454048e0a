"""Products with quantised weights beside cuBLAS's with bfloat16, and how far from their floors.

    python3 -m benchmarks.h200.quantised_products [--rows 1 8 16 64 256 4096] [--formats fp8_rows]

Weights are those of Llama-3.1-8B's layers, of one copy each way in turns, so that none is in the
cache. A line a matrix, format and number of rows: microseconds of bfloat16, of the product as it is
chosen, of the kernel for few rows and of the way of many, speed-up over bfloat16, and the chosen
one's share of the floor: the longer of reading all bytes once and of multiplying at the peak of the
tensor cores that it uses. Last what a layer's four matrices take together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.h200.attention_steps import graphed_seconds
from workers.layers.formats.grouped import GroupedWeight
from workers.layers.kept.fp8 import BLOCK, Fp8Blocks, Fp8Rows
from workers.layers.kept.int4 import Int4Groups
from workers.layers.kept.weight import KeptWeight
from workers.layers.quantised import fp8_products, int4_products
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.products import kept_product

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
MAX_SKINNY_ROWS = 64


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


FORMATS = {"fp8_rows": fp8_rows, "fp8_blocks": fp8_blocks, "int4": int4}
LIMITED = {"fp8_rows": fp8_products, "fp8_blocks": fp8_products, "int4": int4_products}
"""By format, the module whose MAX_SKINNY_ROWS says which way a number of rows takes."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds. skinny: None for more rows than that kernel's one tile is worth."""

    bf16: float
    chosen: float
    skinny: float | None
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


def floor_of(kept: KeptWeight, name: str, num_rows: int, is_skinny: bool) -> float:
    tensor_cores = "bf16" if is_skinny or name == "int4" else "fp8"
    flops = 2.0 * num_rows * kept.out_features * kept.in_features
    activations = 2 * num_rows * (kept.out_features + kept.in_features)
    return max((kept_bytes(kept) + activations) / BYTES_PER_S, flops / FLOPS[tensor_cores])


def by_way(name: str, products: Sequence[KeptProduct], x: torch.Tensor, limit: int) -> float:
    """With the limit of the kernel for few rows set to this."""
    module = LIMITED[name]
    before = module.MAX_SKINNY_ROWS
    module.MAX_SKINNY_ROWS = limit
    try:
        return seconds([lambda product=product: product(x) for product in products])
    finally:
        module.MAX_SKINNY_ROWS = before


def copies(kept: KeptWeight) -> int:
    return max(1, -(-MIN_BYTES // kept_bytes(kept)))


def timed(name: str, matrix: str, num_rows: int) -> Timed:
    out_features, in_features, can_split = MATRICES[matrix]
    first = FORMATS[name](out_features, in_features)
    weights = [first, *(FORMATS[name](out_features, in_features) for _ in range(copies(first) - 1))]
    products = [kept_product(kept, can_split) for kept in weights]
    x = torch.randn(num_rows, in_features, device=CUDA).bfloat16()
    plain = [torch.randn(out_features, in_features, device=CUDA).bfloat16() for _ in range(4)]
    limit = LIMITED[name].MAX_SKINNY_ROWS
    return Timed(
        bf16=seconds([lambda weight=weight: x @ weight.t() for weight in plain]),
        chosen=by_way(name, products, x, limit),
        skinny=by_way(name, products, x, num_rows) if num_rows <= MAX_SKINNY_ROWS else None,
        many=by_way(name, products, x, 0),
        floor=floor_of(first, name, num_rows, num_rows <= limit),
    )


def shown(microseconds: float | None) -> str:
    return "      -" if microseconds is None else f"{microseconds * 1e6:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(CUDA))
    for name in arguments.formats:
        for num_rows in arguments.rows:
            found = {matrix: timed(name, matrix, num_rows) for matrix in MATRICES}
            for matrix, one in found.items():
                print(
                    f"{name:10} {matrix:8} rows {num_rows:5} bf16 {shown(one.bf16)} "
                    f"chosen {shown(one.chosen)} skinny {shown(one.skinny)} "
                    f"many {shown(one.many)} x{one.bf16 / one.chosen:.2f} "
                    f"of the floor {one.floor / one.chosen:.0%}"
                )
            bf16, chosen = (
                sum(getattr(one, kind) for one in found.values()) for kind in ("bf16", "chosen")
            )
            print(
                f"{name:10} layer    rows {num_rows:5} bf16 {shown(bf16)} chosen {shown(chosen)} "
                f"x{bf16 / chosen:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
