"""Tiles of the experts' products that may be worth a try, by how many rows an expert gets.

Needs Triton.
"""

from benchmarks.h200.expert_products import PRODUCTS, Product
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_maps import MappedTiles
from workers.layers.cuda.expert_tiles import BY_POINTERS, Tiles

SWAPPED, PLAIN = True, False

# As MappedTiles, by the average rows of an expert that they are tried below.
MAPPED: tuple[tuple[float, dict[Product, tuple[MappedTiles, ...]]], ...] = (
    (
        12,
        {
            "activate": (
                MappedTiles(16, 64, 128, 3, 4, 12, SWAPPED),
                MappedTiles(16, 64, 64, 6, 4, 12, SWAPPED),
                MappedTiles(16, 64, 64, 6, 4, 1, SWAPPED),
                MappedTiles(32, 64, 64, 5, 4, 12, SWAPPED),
            ),
            "project": (
                MappedTiles(16, 64, 128, 5, 4, 12, SWAPPED),
                MappedTiles(16, 128, 64, 6, 4, 12, SWAPPED),
                MappedTiles(16, 64, 128, 5, 4, 1, SWAPPED),
                MappedTiles(32, 128, 64, 5, 4, 12, SWAPPED),
            ),
        },
    ),
    (
        48,
        {
            "activate": (
                MappedTiles(32, 64, 64, 5, 4, 12, SWAPPED),
                MappedTiles(32, 128, 64, 5, 8, 12, SWAPPED),
                MappedTiles(64, 64, 64, 5, 4, 12, SWAPPED),
                MappedTiles(64, 128, 64, 5, 8, 12, SWAPPED),
                MappedTiles(64, 128, 64, 3, 8, 12, PLAIN),
            ),
            "project": (
                MappedTiles(32, 128, 64, 5, 4, 12, SWAPPED),
                MappedTiles(32, 128, 128, 3, 4, 12, SWAPPED),
                MappedTiles(64, 128, 64, 4, 4, 12, SWAPPED),
                MappedTiles(64, 256, 64, 4, 8, 12, SWAPPED),
                MappedTiles(64, 128, 64, 4, 4, 12, PLAIN),
            ),
        },
    ),
    (
        256,
        {
            "activate": (
                MappedTiles(64, 128, 64, 5, 8, 12, SWAPPED),
                MappedTiles(64, 128, 64, 3, 8, 12, PLAIN),
                MappedTiles(128, 128, 64, 4, 8, 12, PLAIN),
                MappedTiles(128, 64, 64, 4, 8, 12, PLAIN),
            ),
            "project": (
                MappedTiles(64, 128, 64, 4, 4, 12, SWAPPED),
                MappedTiles(64, 128, 64, 4, 4, 12, PLAIN),
                MappedTiles(128, 256, 64, 3, 8, 12, PLAIN),
                MappedTiles(128, 128, 64, 4, 8, 12, PLAIN),
            ),
        },
    ),
    (
        float("inf"),
        {
            "activate": (
                MappedTiles(128, 128, 64, 4, 8, 12, PLAIN),
                MappedTiles(128, 128, 64, 4, 8, 24, PLAIN),
                MappedTiles(128, 128, 64, 3, 8, 12, PLAIN),
            ),
            "project": (
                MappedTiles(128, 256, 64, 3, 8, 12, PLAIN),
                MappedTiles(128, 256, 64, 4, 8, 12, PLAIN),
                MappedTiles(128, 256, 64, 3, 8, 24, PLAIN),
            ),
        },
    ),
)


def candidates(product: Product, average_rows: float, shipped: Tiles) -> list[ExpertTiles]:
    """What is worth a try for so many rows an expert, by pointers too; first what is shipped."""
    place = PRODUCTS.index(product)
    by_pointers = next(tiles[place] for most, tiles in BY_POINTERS if average_rows <= most)
    mapped = next(tiles[product] for below, tiles in MAPPED if average_rows < below)
    return list(dict.fromkeys((shipped[place], by_pointers, *mapped)))
