"""What adapters add to a decode step's products: microseconds a layer, by tiles, beside the floor.

    python3 -m benchmarks.h200.adapter_products [--tokens 64] [--adapters 8] [--rank 32] [--bare 0]

Adapters of Llama-3.1-8B's shapes on all projections, tokens dealt out evenly but for --bare ones
that have none. Each line has microseconds in a graph of every projection with the kernel that reads
it, and of a layer's together: first without adapters, then by the usual tiles with adapters behind
the product, with only their first products beside it, and with both; then both beside it by tiles
that differ from the usual ones in a thing or two, as many as there is time for. floor: adapters'
matrices read once. Where another line is the fastest, it is to be written into AdapterTiles or
DeviceStage.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.h200.adapter_cases import CUDA, PROJECTIONS, Adapters, Case, readers
from workers.adapters.adapted_products import AdapterWays, AddAdapters, AddedBehind, StepGroups
from workers.adapters.added_beside import ways_beside
from workers.layers.cuda.adapter_groups import group_tokens
from workers.layers.cuda.adapter_products import USUAL_TILES, AdapterTiles

CHANGES: tuple[dict[str, int], ...] = (
    {"num_splits": 8},
    {"outputs": 128},
    {"num_stages": 4},
    {"num_splits": 8, "outputs": 128},
    {"outputs": 512, "num_warps": 8},
    {"num_stages": 2},
    {"num_splits": 2},
    {"inputs": 256},
    {"num_splits": 16, "num_stages": 2},
    {"num_splits": 8, "inputs": 64},
    {"outputs": 64},
)
"""Most promising first."""


def line_of(cases: dict[str, Case], seconds: Callable[[Case], float]) -> str:
    found = {name: seconds(case) for name, case in cases.items()}
    each = " ".join(f"{name} {value * 1e6:6.1f}" for name, value in found.items())
    return f"{each} layer {sum(found.values()) * 1e6:6.1f}"


def show(
    name: str, cases: dict[str, Case], step: StepGroups, tiles: AdapterTiles, add: AddAdapters
) -> None:
    try:
        line = line_of(cases, partial(Case.seconds, tiles=tiles, add=add, step=step))
    except OutOfResources as error:
        line = str(error)
    print(f"{name:7} {line}  {tiles}", flush=True)


def lines(ways: AdapterWays) -> Iterator[tuple[str, AdapterTiles, AddAdapters]]:
    """By the usual tiles behind, with the shrink beside, with both beside; then that by others."""
    yield "behind", USUAL_TILES, AddedBehind
    yield "shrunk", USUAL_TILES, ways.over_ranks
    yield "beside", USUAL_TILES, ways.own
    for change in CHANGES:
        yield "beside", replace(USUAL_TILES, **change), ways.own


def step_of(adapters: Adapters, num_bare: int) -> StepGroups:
    slots = torch.arange(adapters.num_tokens, device=CUDA)
    adapter_of_slot = 1 + slots % adapters.num_adapters
    adapter_of_slot[:num_bare] = 0
    return StepGroups(group_tokens(adapter_of_slot.int(), slots, adapters.num_adapters))


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--bare", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=75, help="after which no line is begun")
    arguments = parser.parse_args()
    adapters = Adapters(arguments.tokens, arguments.adapters, arguments.rank)
    step = step_of(adapters, arguments.bare)
    read = readers(adapters.num_tokens)
    cases = {name: Case(name, read[name], adapters) for name in PROJECTIONS}
    print(f"{torch.cuda.get_device_name()}, {arguments}")
    print(f"floor   {sum(case.floor_s for case in cases.values()) * 1e6:.1f} us a layer")
    print(f"without {line_of(cases, Case.plain_seconds)}", flush=True)
    for name, tiles, add in lines(ways_beside(CUDA, num_ranks=2)):
        if time.perf_counter() - began > arguments.seconds:
            print(f"no time was left for {tiles}")
            continue
        show(name, cases, step, tiles, add)


if __name__ == "__main__":
    main()
