"""Tiles of the experts' two products by number of tokens, each against those that are shipped.

    python3 -m benchmarks.h200.expert_candidates [CONFIG_JSON ...] [--tokens 64 256 1024 8192]

Three models' sizes, or those of configs whose tokens choose by softmax. A line a candidate: the
product's time, how often it fits into the shipped one's, and the largest error against float32 as a
share of the largest value; last the fastest pair with blocks of one size. Kernels are compiled
first, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from benchmarks.h200.attention_steps import graphed_seconds
from benchmarks.h200.expert_candidate_tiles import candidates
from benchmarks.h200.expert_products import PRODUCTS, Case, Product, Sizes, compile_kernel
from benchmarks.h200.experts import CONFIGS, mixture_of
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import Chosen, choose_by_softmax
from workers.layers.cuda.expert_tiles import Tiles, table_for, tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.moe.experts import Experts
from workers.layers.moe.routing import SoftmaxRouting

MODELS = ("gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b")
NUM_TOKENS = (64, 256, 1024, 8192)
REPEATS = 20
MAX_PROCESSES = 14
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Found:
    """One candidate. error: a share of the largest value."""

    product: Product
    tiles: ExpertTiles
    seconds: float
    error: float


def fastest_pair(found: Iterable[Found]) -> tuple[Found, Found]:
    """The two products that take least together, of blocks of one size."""
    best: dict[tuple[int, Product], Found] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        best.setdefault((one.tiles.block_rows, one.product), one)
    pairs = [
        (one, best[rows, "project"])
        for (rows, product), one in best.items()
        if product == "activate" and (rows, "project") in best
    ]
    return min(pairs, key=lambda pair: pair[0].seconds + pair[1].seconds)


def choose(layer: Experts, num_tokens: int) -> Chosen:
    spec, routing = layer.spec, layer.spec.routing
    if not isinstance(routing, SoftmaxRouting):
        raise SystemExit(f"{type(routing).__name__} has no kernel of its own")
    logits = torch.randn(num_tokens, spec.num_experts, device=CUDA)
    num_chosen, num_pieces = routing.num_chosen, spec.num_pieces
    return choose_by_softmax(logits, num_chosen, num_pieces, routing.factor, routing.is_normed)


def measured(case: Case, product: Product, tiles: ExpertTiles) -> Found:
    """Of infinite time where the GPU has too little shared memory for it."""
    run = case.run_of(product, tiles)
    try:
        return Found(product, tiles, graphed_seconds(run, REPEATS), case.error(product, run()))
    except triton.runtime.errors.OutOfResources:
        return Found(product, tiles, float("inf"), float("nan"))


def shipped_tiles(layer: Experts, num_tokens: int) -> tuple[float, Tiles]:
    """Rows of an expert on average, and the tiles for them."""
    experts, limits = layer.weights, DeviceLimits.of(CUDA)
    num_pairs, num_experts = num_tokens * layer.spec.num_choices, experts.down.shape[0]
    table = table_for(experts, limits)
    return num_pairs / num_experts, tiles_for(table, num_pairs, num_experts, limits.shared_bytes)


def sweep(name: str, layer: Experts, num_tokens: int) -> None:
    hidden_size = layer.weights.down.shape[1]
    x = torch.randn((num_tokens, hidden_size), dtype=torch.bfloat16, device=CUDA)
    case = Case.of(layer.weights, choose(layer, num_tokens), x)
    average_rows, shipped = shipped_tiles(layer, num_tokens)
    found: list[Found] = []
    ours_s = 0.0
    for product in PRODUCTS:
        of_product = [
            measured(case, product, tiles) for tiles in candidates(product, average_rows, shipped)
        ]
        ours_s += of_product[0].seconds
        for one in of_product:
            print(name, num_tokens, told(one, of_product[0].seconds), flush=True)
        found += of_product
    pair = fastest_pair(found)
    both_s = sum(one.seconds for one in pair)
    print(name, num_tokens, f"fastest pair {both_s * 1e6:.1f} us, x{ours_s / both_s:.3f}:", end=" ")
    print(*(one.tiles for one in pair), flush=True)


def told(one: Found, shipped_s: float) -> str:
    speed = f"x{shipped_s / one.seconds:5.3f} error {one.error:.1e}"
    return f"{one.product:8} {one.seconds * 1e6:8.1f} us {speed} {one.tiles}"


def compile_all(layers: Sequence[Experts], token_counts: Sequence[int]) -> None:
    tasks: dict[tuple[Sizes, Product, ExpertTiles], None] = {}
    for layer in layers:
        sizes = Sizes.of(layer.weights, layer.spec.num_choices)
        for num_tokens in token_counts:
            for product in PRODUCTS:
                for tiles in candidates(product, *shipped_tiles(layer, num_tokens)):
                    tasks[sizes, product, tiles] = None
    context = get_context("spawn")
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(compile_kernel, *zip(*tasks, strict=True)))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    paths = [CONFIGS / f"{model}.json" for model in MODELS]
    parser.add_argument("configs", nargs="*", type=Path, default=paths)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(NUM_TOKENS))
    arguments = parser.parse_args()
    begun = time.monotonic()
    layers = {path.stem: mixture_of(path, CUDA).experts for path in arguments.configs}
    compile_all(list(layers.values()), arguments.tokens)
    print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    for name, layer in layers.items():
        for num_tokens in arguments.tokens:
            sweep(name, layer, num_tokens)


if __name__ == "__main__":
    main()
