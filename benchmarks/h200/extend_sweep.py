"""The Triton extend kernel's tiles, swept over work: what extend_shape.CANDIDATES is ordered by.

    python -m benchmarks.h200.extend_sweep [--heads 32,8,128]

Prints each work's tiles from the fastest on, which of them is taken today, and what share of the
rate of fa3 that one and the fastest reach. Tiles that do not compile or do not fit are named.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from triton.runtime.errors import OutOfResources

from attention.backends.triton_paged import TritonBackend
from attention.kernels.extend_shape import ExtendGeometry, ExtendTiles
from attention.kernels.gpu_limits import GpuLimits, gpu_limits
from benchmarks.h200.attention import FA3, OWN_PREFILLS
from benchmarks.h200.attention_steps import Heads, Setup, build_step, eager_seconds_per_layer

REPEATS = 20
SWEPT = tuple(
    ExtendTiles(*sizes) for sizes in itertools.product((16, 32, 64, 128), (32, 64, 128), (2, 3, 4))
)


class SweptGeometry(ExtendGeometry):
    """Takes the tiles that it is told to."""

    current: ExtendTiles

    def tiles(self, max_new_tokens: int, limits: GpuLimits, is_tree: bool = False) -> ExtendTiles:
        return self.current


class SweptBackend(TritonBackend):
    def _geometry(self) -> ExtendGeometry:
        own = super()._geometry()
        return SweptGeometry(*(getattr(own, name) for name in ExtendGeometry.__slots__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, elements")
    heads = Heads(*map(int, parser.parse_args().heads.split(",")))
    limits = gpu_limits(torch.device("cuda"))
    geometry = ExtendGeometry(heads.kv, heads.q // heads.kv, heads.dim, heads.dim, 128)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {heads}")
    for work in OWN_PREFILLS:
        taken = geometry.tiles(work.new, limits)
        SweptGeometry.current = taken
        step, results = build_step(Setup(SweptBackend, heads), work), []
        for tiles in SWEPT:
            SweptGeometry.current = tiles
            try:
                results.append((eager_seconds_per_layer(step, REPEATS), tiles))
            except OutOfResources as error:
                print(f"  {tiles}: {error}", flush=True)
        theirs_s = eager_seconds_per_layer(build_step(Setup(FA3, heads), work), REPEATS)
        by_tiles = {tiles: seconds for seconds, tiles in results}
        fastest_s = min(by_tiles.values())
        print(
            f"\n{work}: fa3 {theirs_s * 1e6:.1f} us; triton {theirs_s / by_tiles[taken]:.2f} of it "
            f"as taken today, {theirs_s / fastest_s:.2f} with the fastest tiles"
        )
        for seconds, tiles in sorted(results, key=lambda one: one[0])[:8]:
            mark = "  taken today" if tiles == taken else ""
            print(f"  {seconds * 1e6:8.1f} us  {tiles}{mark}", flush=True)


if __name__ == "__main__":
    main()
