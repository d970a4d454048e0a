"""One token's decode step with kept weights: which tiles each matrix should have, beside its like.

    python3 -m benchmarks.h200.kept_chain [--formats fp8_rows int4]

As layer_chain.py for bfloat16: layers of Llama-3.1-8B's sizes, distinct weights for each, in one
graph: norm, qkv, a reader of it in attention's stead, o, norm, gate_up with its activation, down.
So a kernel's first loads run beside its predecessor, as in a step. First bfloat16's shipped GEMMs
and the tables as they are; then, role by role, each of the tiles in its place, the others being the
best so far. Microseconds a layer, medians.
Kernels are compiled first, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.h200.attention_steps import graphed_seconds
from benchmarks.h200.product_candidates import one_row_worth_trying
from benchmarks.h200.quantised_products import CUDA, FORMATS, MATRICES
from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.gemm.build import Activate, GemmBuilder
from workers.layers.gemm.build import Multiply as MultiplyBy
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import GemmShape
from workers.layers.kept.weight import KeptWeight
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import GemvTiles, SkinnyTiles
from workers.layers.quantised.tile_table import TileRule, TileTable

NUM_LAYERS = 6
REPEATS = 20
MAX_PROCESSES = 14
EPS = 1e-5
MAX_ERROR = 0.05
"""Relative, of products with FP8 activations, too."""
ROLES = tuple(MATRICES)

Multiply = Callable[[torch.Tensor], torch.Tensor]
Gemm = MultiplyBy | Activate
Layer = Mapping[str, Multiply]
"""By role; gate_up's leaves the activation."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a role's matrices are multiplied. tiles None: as the tables have it. is_gated: the
    activation is made in the kernel."""

    tiles: SkinnyTiles | None = None
    is_gated: bool = False

    def __str__(self) -> str:
        told = "as the table has it" if self.tiles is None else str(self.tiles)
        return f"gated {told}" if self.is_gated else told


AS_TABLED = Way()


def ways_of(name: str, role: str) -> list[Way]:
    tiles = one_row_worth_trying(name)
    ways = [Way(one) for one in tiles]
    if role == "gate_up":
        ways += [Way(one, is_gated=True) for one in tiles if isinstance(one, GemvTiles)]
    return ways


def multiply_of(name: str, role: str, kept: KeptWeight, way: Way) -> Multiply:
    make = FORMATS[name].product
    if way.tiles is None:
        product = make(kept, True)
    else:
        rule: TileTable = (TileRule(1, way.tiles),)
        product = make(kept, True, rule, rule if way.is_gated else ())
    return KeptGatedProduct(product, "silu") if role == "gate_up" else product


def run_layers(layers: Sequence[Layer], x: torch.Tensor, scale: torch.Tensor) -> None:
    """x: (1, hidden_size), what each layer's o multiplies, too."""
    residual = x.clone()
    hidden = rms_norm(residual, scale, EPS)
    for layer in layers:
        # Reads all partial products, as rotation does.
        gate_and_mul(layer["qkv"](hidden), x.dtype, "silu")
        hidden = add_rms_norm_(layer["o"](x), residual, scale, EPS)
        hidden = add_rms_norm_(layer["down"](layer["gate_up"](hidden)), residual, scale, EPS)


def layer_us(layers: Sequence[Layer]) -> float:
    hidden_size = MATRICES["qkv"][1]
    x = torch.randn(1, hidden_size, device=CUDA).bfloat16()
    scale = torch.ones(hidden_size, dtype=x.dtype, device=CUDA)
    seconds: float = graphed_seconds(lambda: run_layers(layers, x, scale), REPEATS)
    return seconds / len(layers) * 1e6


def bf16_us() -> float:
    """By the GEMMs that are shipped for this GPU."""
    known, builder = GemmChooser.for_device(CUDA).known, GemmBuilder.on(CUDA)
    layers: list[dict[str, Multiply]] = [{} for _ in range(NUM_LAYERS)]
    for role, (out_features, in_features, _) in MATRICES.items():
        shape = GemmShape(out_features, in_features, "gated" if role == "gate_up" else "split")
        config = known[str(shape)][1]
        for layer in layers:
            weight = torch.randn(out_features, in_features, dtype=torch.bfloat16, device=CUDA)
            gemm = builder.build(config, weight, shape.role)
            layer[role] = partial(_multiply, gemm, weight)
    return layer_us(layers)


def _multiply(gemm: Gemm, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gemm(x, weight)


def compile_ways(work: tuple[str, str, Sequence[Way]]) -> list[bool]:
    """Run each once, so that the next process finds it compiled; tells which are wrong. Returns
    which are right."""
    name, role, ways = work
    out_features, in_features, _ = MATRICES[role]
    kept = FORMATS[name].make(out_features, in_features)
    x = torch.randn(1, in_features, device=CUDA).bfloat16()
    want = x.float() @ kept.dequantised().float().t()
    if role == "gate_up":
        want = gate_and_mul(want[None], x.dtype, "silu").float()
    are_right = []
    for way in ways:
        try:
            got = multiply_of(name, role, kept, way)(x).float()
        except OutOfResources as error:
            print(f"{name} {role} {way}: {error}", flush=True)
            are_right.append(False)
            continue
        off = float((got.reshape(-1, want.shape[1]).sum(0) - want[0]).norm() / want.norm())
        # No number is not less either.
        are_right.append(off < MAX_ERROR)
        if not are_right[-1]:
            print(f"WRONG: {name} {role} {way}: off by {off:.2g}", flush=True)
    torch.cuda.synchronize()
    return are_right


def compile_all(names: Iterable[str]) -> None:
    start_s = time.perf_counter()
    works = []
    for name in names:
        for role in ROLES:
            ways = ways_of(name, role)
            works += [(name, role, ways[first::8]) for first in range(8) if ways[first::8]]
    num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as processes:
        list(processes.map(compile_ways, works))
    print(f"compiled in {time.perf_counter() - start_s:.1f} s", flush=True)


def best_way(
    name: str, role: str, others: Mapping[str, Way], weights: Mapping[str, Sequence[KeptWeight]]
) -> tuple[float, Way]:
    """Prints a line a way, the fastest last. others: of all roles."""
    found: list[tuple[float, Way]] = []
    for way in [others[role], *ways_of(name, role)]:
        try:
            us = layer_us(layers_of(name, {**others, role: way}, weights))
        except OutOfResources:
            continue
        found.append((us, way))
    found.sort(key=lambda one: -one[0])
    for us, way in found:
        print(f"{name} {role} {us:.2f} us a layer: {way}", flush=True)
    return found[-1]


def layers_of(
    name: str, ways: Mapping[str, Way], weights: Mapping[str, Sequence[KeptWeight]]
) -> list[Layer]:
    return [
        {role: multiply_of(name, role, weights[role][at], ways[role]) for role in ROLES}
        for at in range(NUM_LAYERS)
    ]


def sweep(name: str) -> None:
    weights = {
        role: [FORMATS[name].make(*MATRICES[role][:2]) for _ in range(NUM_LAYERS)] for role in ROLES
    }
    ways = dict.fromkeys(ROLES, AS_TABLED)
    start = layer_us(layers_of(name, ways, weights))
    print(f"{name}: {start:.2f} us a layer as the tables have it", flush=True)
    us = start
    # The longest first: what runs beside it is chosen with it there.
    for role in ("gate_up", "down", "qkv", "o"):
        us, ways[role] = best_way(name, role, ways, weights)
    print(f"best {name}: {us:.2f} us a layer (tables {start:.2f})")
    for role, way in ways.items():
        print(f"best {name} {role}: {way}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["fp8_rows", "int4"])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(CUDA))
    compile_all(arguments.formats)
    print(f"bf16: {bf16_us():.2f} us a layer")
    for name in arguments.formats:
        sweep(name)


if __name__ == "__main__":
    main()
