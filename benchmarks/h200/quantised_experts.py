"""Experts' products with kept weights beside those with bfloat16, and how far from their floors.

    python3 -m benchmarks.h200.quantised_experts [--tokens 1 64 256 1024 8192] [--sweep]
        [--ways RoundedTiles Fp8WarpgroupTiles]

Sizes of gpt-oss-20b in MXFP4 and of Qwen3-30B-A3B in FP8 blocks. A line a number of tokens:
microseconds of both products together in bfloat16 and as kept, speed-up, and the kept ones' share
of the floor: the longer of reading the chosen experts' bytes and of multiplying in bfloat16.
--sweep: before it a line for each of the tiles that are worth trying, and for matrices: what to
write into workers/layers/quantised/expert_products.py. These lines count the norm behind the
products too, which adds up their parts: splits make more of them. --ways: of the sweep's lines
only those whose ways have one of these words in their names.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.h200.attention_steps import graphed_seconds
from workers.layers.cuda.expert_routing import Chosen, choose_by_softmax
from workers.layers.cuda.norm import add_rms_norm_
from workers.layers.cuda.routed_experts import partial_products
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.kept.experts import KeptExperts, Stack
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_gemm import KeptTiles
from workers.layers.quantised.expert_products import (
    AsKept,
    ByMatrices,
    ExpertWay,
    InSplits,
    kept_partial_products,
)
from workers.layers.quantised.expert_splits import SplitShape, SplitTiles
from workers.layers.quantised.expert_warpgroups import Fp8WarpgroupTiles
from workers.layers.quantised.fp4_experts import Fp4WarpgroupTiles
from workers.layers.quantised.warpgroup_limits import has_warpgroups
from workers.layers.routed_experts import SILU, Gating, RoutedWeights

CUDA = torch.device("cuda", 0)
NUM_TOKENS = (1, 64, 256, 1024, 8192)
REPEATS = 20
FEW_ROWS = 16
"""Of an expert: where splits are worth trying, and neither matrices nor activations in FP8 are."""
GATE_UP_SHAPES = tuple(SplitShape(n, splits, 4, 4) for n in (32, 64) for splits in (1, 2, 4, 8))
DOWN_SHAPES = tuple(
    SplitShape(columns, splits, stages, 4)
    for columns, stages in ((64, 4), (128, 3))
    for splits in (1, 2, 4, 8)
)
BYTES_PER_S = 4.8e12
FLOPS = 989e12
"""Of an H200, dense in bfloat16, as NVIDIA gives them."""


def fp4_stack(num: int, rows: int, columns: int) -> Stack:
    stack = Fp4Stack(num, rows, columns, CUDA)
    for place in range(num):
        size = rows, columns // 32
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, device=CUDA)
        scales = torch.full(size, 120, dtype=torch.uint8, device=CUDA)
        stack.take(place, slice(0, rows), blocks, scales)
    return stack


def fp8_stack(num: int, rows: int, columns: int) -> Stack:
    stack = Fp8Stack(num, rows, columns, CUDA)
    for place in range(num):
        values = (torch.randn(rows, columns, device=CUDA) * 64.0).clamp_(-448.0, 448.0)
        scales = torch.full((rows // 128, columns // 128), 0.02 / 64.0, device=CUDA)
        stack.take(place, 0, values.to(torch.float8_e4m3fn), scales)
    return stack


@dataclass(frozen=True, slots=True)
class Model:
    hidden_size: int
    width: int
    num_experts: int
    num_chosen: int
    gating: Gating
    has_bias: bool
    stack: Callable[[int, int, int], Stack]


MODELS = {
    "gpt-oss-20b mxfp4": Model(2880, 2880, 32, 4, Gating(1.702, 7.0), True, fp4_stack),
    "qwen3-30b-a3b fp8": Model(2048, 768, 128, 8, SILU, False, fp8_stack),
}


def kept_experts(model: Model) -> KeptExperts:
    num, hidden, width = model.num_experts, model.hidden_size, model.width
    biases: tuple[torch.Tensor | None, ...] = (None, None)
    if model.has_bias:
        biases = tuple(torch.randn(num, n, device=CUDA).bfloat16() for n in (2 * width, hidden))
    stacks = model.stack(num, 2 * width, hidden), model.stack(num, hidden, width)
    return KeptExperts(*stacks, model.gating, *biases)


def plain_experts(kept: KeptExperts) -> RoutedWeights:
    matrices = (one.dequantised().bfloat16() for one in (kept.gate_up, kept.down))
    return RoutedWeights(*matrices, kept.gating, kept.gate_up_bias, kept.down_bias)


def stack_bytes(stack: Stack) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in stack.buffers())


def floor_seconds(model: Model, kept: KeptExperts, chosen: Chosen) -> float:
    share = len(chosen.ids.unique()) / model.num_experts
    num_bytes = share * (stack_bytes(kept.gate_up) + stack_bytes(kept.down))
    flops = 2.0 * chosen.ids.numel() * 3 * model.hidden_size * model.width
    return max(num_bytes / BYTES_PER_S, flops / FLOPS)


def worth_trying(rows: float, is_fp8: bool) -> list[ExpertWay]:
    """rows: of an expert, on average."""
    ways: list[ExpertWay] = [
        AsKept(KeptTiles(block_rows, columns, stages, warps))
        for block_rows in (16, 32, 64)
        if rows / 2 <= block_rows <= max(16, 2 * rows)
        for columns, warps in ((64, 4), (128, 4 if block_rows < 64 else 8))
        for stages in (3, 4)
    ]
    if rows > FEW_ROWS:
        ways.append(ByMatrices())
        if not is_fp8 and has_warpgroups(DeviceLimits.of(CUDA)):
            ways += [Fp4WarpgroupTiles(256, 3, blocks) for blocks in (5, 13)]
            ways.append(Fp4WarpgroupTiles(128, 5, 13))
    if is_fp8 and rows > 1 and has_warpgroups(DeviceLimits.of(CUDA)):
        ways += [Fp8WarpgroupTiles(3), Fp8WarpgroupTiles(4)]
    if is_fp8 and rows >= FEW_ROWS:
        ways += [RoundedTiles(64, stages, 8) for stages in (3, 4)]
        ways += [RoundedTiles(128, stages, warps) for stages, warps in ((3, 8), (2, 16), (3, 16))]
    return ways


def seconds_of_ways(
    ways: Sequence[ExpertWay], x: torch.Tensor, chosen: Chosen, kept: KeptExperts
) -> dict[ExpertWay, float]:
    """Of those that fit the GPU, with the norm behind."""
    residual, weight = x.clone(), torch.ones_like(x[0])

    def run(way: ExpertWay) -> torch.Tensor:
        return add_rms_norm_(way.products(x, chosen, kept, 1), residual, weight, 1e-6)

    found: dict[ExpertWay, float] = {}
    for way in ways:
        try:
            found[way] = graphed_seconds(partial(run, way), REPEATS)
        except OutOfResources as error:
            print(f"tokens {len(x)} {way}: {error}", flush=True)
    return found


def seconds_of_splits(x: torch.Tensor, chosen: Chosen, kept: KeptExperts) -> dict[ExpertWay, float]:
    """First the shapes of one product, then with the fastest of them those of the other."""

    def tiles(gate_up: SplitShape, down: SplitShape) -> InSplits:
        return InSplits(SplitTiles(16, gate_up, down))

    usual = DOWN_SHAPES[0]
    found = seconds_of_ways([tiles(one, usual) for one in GATE_UP_SHAPES], x, chosen, kept)
    best = min(GATE_UP_SHAPES, key=lambda one: found.get(tiles(one, usual), math.inf))
    others = [tiles(best, one) for one in DOWN_SHAPES[1:]]
    return found | seconds_of_ways(others, x, chosen, kept)


def sweep(
    name: str, x: torch.Tensor, chosen: Chosen, kept: KeptExperts, words: Sequence[str]
) -> None:
    """words: as --ways, all where there are none."""
    rows = chosen.ids.numel() / kept.down.num_matrices
    ways = worth_trying(rows, isinstance(kept.down, Fp8Stack))
    if words:
        ways = [way for way in ways if any(word in str(way) for word in words)]
    found = seconds_of_ways(ways, x, chosen, kept)
    if rows <= FEW_ROWS and not words:
        found |= seconds_of_splits(x, chosen, kept)
    for way in sorted(found, key=found.__getitem__):
        print(f"sweep {name} tokens {len(x)} rows {rows} {found[way] * 1e6:8.1f} {way}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--ways", nargs="+", default=[])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(CUDA))
    for name in arguments.models:
        model = MODELS[name]
        kept = kept_experts(model)
        plain = plain_experts(kept)
        for num_tokens in arguments.tokens:
            x = torch.randn(num_tokens, model.hidden_size, device=CUDA).bfloat16()
            logits = torch.randn(num_tokens, model.num_experts, device=CUDA)
            chosen = choose_by_softmax(logits, model.num_chosen, 0, 1.0, True)
            if arguments.sweep:
                sweep(name, x, chosen, kept, arguments.ways)
            before = graphed_seconds(partial(partial_products, x, chosen, plain), REPEATS)
            after = graphed_seconds(partial(kept_partial_products, x, chosen, kept), REPEATS)
            floor = floor_seconds(model, kept, chosen)
            print(
                f"{name} tokens {num_tokens:5} bf16 {before * 1e6:8.1f} kept {after * 1e6:8.1f} "
                f"x{before / after:.2f} of the floor {floor / after:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
