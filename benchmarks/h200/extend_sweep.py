"""The Triton extend kernel's tiles, swept over work: what extend_shape.CANDIDATES is ordered by.

    python -m benchmarks.h200.extend_sweep [--heads 32,8,128] [--works 64,0,100 1,3000,100]
        [--tiles 64,32,2 128,64,3]

Works are rows, keys before the new tokens and new tokens of a row. Prints each work's tiles from
the fastest on, and what share of the rate of fa3 is reached by what is taken today, which may be
another kernel, and by the fastest tiles. Steps are graphs: what counts is the device's time. Tiles
that do not compile or do not fit are named.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
from triton.runtime.errors import OutOfResources

from attention.backends.triton_paged import TritonBackend
from attention.kernels.extend_shape import ExtendGeometry, ExtendTiles
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_extend import PagedExtend
from benchmarks.h200.attention import FA3, OWN_PREFILLS
from benchmarks.h200.attention_steps import Heads, Setup, Step, Work, build_step, seconds_a_layer

REPEATS = 20
SWEPT = tuple(
    ExtendTiles(*sizes) for sizes in itertools.product((16, 32, 64, 128), (32, 64, 128), (2, 3))
)


class SweptGeometry(ExtendGeometry):
    """Takes the tiles that it is told to."""

    current: ExtendTiles

    def tiles(
        self,
        max_new_tokens: int,
        limits: GpuLimits,
        is_tree: bool = False,
        preferred: Sequence[ExtendTiles] = (),
    ) -> ExtendTiles:
        return self.current


class SweptBackend(TritonBackend):
    def _geometry(self) -> ExtendGeometry:
        own = super()._geometry()
        return SweptGeometry(*(getattr(own, name) for name in ExtendGeometry.__slots__))

    def _make_extend(self) -> PagedExtend:
        return PagedExtend(self._geometry(), self._limits)


def sweep(step: Step, work: Work, swept: Sequence[ExtendTiles]) -> list[tuple[float, ExtendTiles]]:
    """Seconds of the tiles that fit, from the fastest on."""
    results = []
    for tiles in swept:
        SweptGeometry.current = tiles
        try:
            results.append((seconds_a_layer(step, REPEATS), tiles))
        except OutOfResources as error:
            print(f"  {work} {tiles}: {error}", flush=True)
    return sorted(results, key=lambda one: one[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, elements")
    parser.add_argument("--works", nargs="+", help="default: those of benchmarks.h200.attention")
    parser.add_argument("--tiles", nargs="+", help="rows, keys and stages of each; default: many")
    arguments = parser.parse_args()
    swept = [ExtendTiles(*map(int, one.split(","))) for one in arguments.tiles or ()] or SWEPT
    heads = Heads(*map(int, arguments.heads.split(",")))
    works = [Work(*map(int, one.split(","))) for one in arguments.works or ()] or OWN_PREFILLS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {heads}")
    for work in works:
        theirs_s = seconds_a_layer(build_step(Setup(FA3, heads), work), REPEATS)
        taken_s = seconds_a_layer(build_step(Setup(TritonBackend, heads), work), REPEATS)
        SweptGeometry.current = ExtendTiles(16, 16, 1)
        results = sweep(build_step(Setup(SweptBackend, heads), work), work, swept)
        print(
            f"\n{work}: fa3 {theirs_s * 1e6:.1f} us; triton {theirs_s / taken_s:.2f} of it as "
            f"taken today, {theirs_s / results[0][0]:.2f} with the fastest tiles"
        )
        for seconds, tiles in results[:8]:
            print(f"  {seconds * 1e6:8.1f} us  {tiles}", flush=True)


if __name__ == "__main__":
    main()
