"""What adapters add to a decode step's products: microseconds a layer, by tiles, beside the floor.

    python3 -m benchmarks.h200.adapter_products [--tokens 64] [--adapters 8] [--rank 32]

Adapters of Llama-3.1-8B's shapes on all projections, tokens dealt out evenly. First the products
without adapters, then two lines for each of the tiles that are worth trying, as they are first:
microseconds in a graph of each projection with its adapters, and of a layer's together, with the
shrink behind the product and beside it. floor: adapters' matrices read once. To be written into
AdapterTiles, and DressedModel's choice, where another line is the fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.h200.attention_steps import graphed_seconds
from benchmarks.h200.shrunk_beside import ShrunkBeside
from workers.adapters.adapted_products import AddAdapters, AddedBehind, StepGroups
from workers.layers.cuda.adapter_groups import group_tokens
from workers.layers.cuda.adapter_products import (
    USUAL_TILES,
    AdapterMatrices,
    AdapterTiles,
    output_blocks,
)
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialProducts, partial_gemms

CUDA = torch.device("cuda", 0)
HIDDEN, WIDTH, KV = 4096, 14336, 1024
PROJECTIONS = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (WIDTH, WIDTH)),
    "down": (WIDTH, (HIDDEN,)),
}
"""(inputs, outputs of each part), on one rank."""
REPEATS = 20
NUM_COPIES = 32
"""Of every matrix, by turns as layers have their own: they do not stay in the L2 cache."""
BYTES_PER_S = 4.8e12
"""Of an H200, as NVIDIA gives it."""


def parts_of(outputs: tuple[int, ...]) -> list[slice]:
    stops = [sum(outputs[: index + 1]) for index in range(len(outputs))]
    return [slice(stop - size, stop) for stop, size in zip(stops, outputs, strict=True)]


def matrices(
    inputs: int, outputs: tuple[int, ...], num_adapters: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and ranks as AdapterMatrices has them."""
    num_slots = num_adapters + 1
    a = torch.randn(num_slots, len(outputs) * rank, inputs, device=CUDA).bfloat16()
    b = torch.randn(num_slots, sum(outputs), rank, device=CUDA).bfloat16()
    ranks = torch.full((num_slots, len(outputs)), rank, dtype=torch.int32, device=CUDA)
    return a, b, ranks


class Case:
    """One projection of all layers, with inputs and groups of tokens."""

    def __init__(
        self, inputs: int, outputs: tuple[int, ...], num_tokens: int, num_adapters: int, rank: int
    ) -> None:
        self._parts = parts_of(outputs)
        self._matrices = [matrices(inputs, outputs, num_adapters, rank) for _ in range(NUM_COPIES)]
        weights = [
            torch.randn(sum(outputs), inputs, device=CUDA).bfloat16() for _ in range(NUM_COPIES)
        ]
        self._gemms = partial_gemms(GemmChooser.for_device(CUDA), weights, True)
        self._x = torch.randn(num_tokens, inputs, device=CUDA).bfloat16()
        a, b, _ = self._matrices[0]
        self.floor_s = (a[1:].numel() + b[1:].numel()) * 2 / BYTES_PER_S

    def plain_seconds(self) -> float:
        return self._seconds_a_layer(self._gemms)

    def seconds(self, tiles: AdapterTiles, add: AddAdapters, step: StepGroups) -> float:
        """Of one layer. Raises OutOfResources where the tiles do not fit."""
        blocks = output_blocks(self._parts, CUDA, tiles)
        layers = [AdapterMatrices(*one, blocks, tiles) for one in self._matrices]
        return self._seconds_a_layer(
            [add(gemm, layer, step) for gemm, layer in zip(self._gemms, layers, strict=True)]
        )

    def _seconds_a_layer(self, products: Sequence[PartialProducts]) -> float:
        def run() -> None:
            for one in products:
                one(self._x)

        return graphed_seconds(run, REPEATS) / NUM_COPIES


def worth_trying() -> list[AdapterTiles]:
    others = [
        AdapterTiles(16, rank, inputs, outputs, num_splits, 4)
        for rank, inputs, outputs, num_splits in product(
            (32,), (128, 256), (64, 128, 256), (2, 4, 8)
        )
    ]
    return [USUAL_TILES, *others]


def line_of(cases: dict[str, Case], seconds: Callable[[Case], float]) -> str:
    found = {name: seconds(case) for name, case in cases.items()}
    each = " ".join(f"{name} {value * 1e6:6.1f}" for name, value in found.items())
    return f"{each} layer {sum(found.values()) * 1e6:6.1f}"


def show(cases: dict[str, Case], step: StepGroups, tiles: AdapterTiles) -> None:
    stream = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    ways: dict[str, AddAdapters] = {
        "behind": AddedBehind,
        "beside": partial(ShrunkBeside, stream=stream),
    }
    for name, add in ways.items():
        try:
            line = line_of(cases, partial(Case.seconds, tiles=tiles, add=add, step=step))
        except OutOfResources as error:
            line = str(error)
        print(f"{name} {line}  {tiles}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    slots = torch.arange(arguments.tokens, device=CUDA)
    adapter_of_slot = (1 + slots % arguments.adapters).to(torch.int32)
    step = StepGroups(group_tokens(adapter_of_slot, slots, arguments.adapters))
    cases = {
        name: Case(inputs, outputs, arguments.tokens, arguments.adapters, arguments.rank)
        for name, (inputs, outputs) in PROJECTIONS.items()
    }
    print(f"{torch.cuda.get_device_name()}, {arguments}")
    print(f"floor {sum(case.floor_s for case in cases.values()) * 1e6:.1f} us a layer")
    print(f"without {line_of(cases, Case.plain_seconds)}")
    for tiles in worth_trying():
        fitting = replace(tiles, rank=min(tiles.rank, max(16, arguments.rank)))
        show(cases, step, fitting)


if __name__ == "__main__":
    main()
