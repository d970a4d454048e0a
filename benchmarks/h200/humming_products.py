"""humming-kernels' products with quantised weights, by the sizes of quantised_products.py.

    PYTHONPATH=HUMMING:. python3 -m benchmarks.h200.humming_products [--rows 1 16 64 256 4096]

HUMMING: where the wheel is unpacked. Weights of four bits in groups of 128 and of FP8 by row, with
activations of bfloat16. A line a matrix, format and number of rows: microseconds; what does not
compile or run says why instead. Last what a layer's four matrices take together.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.h200.quantised_products import CUDA, MATRICES, inputs_of, seconds

ROWS = (1, 16, 64, 256, 4096)
WEIGHTS: Mapping[str, Mapping[str, object]] = {
    "int4": {"dtype": "uint4", "group_size": 128},
    "fp8_rows": {"dtype": "float8e4m3"},
}
NUM_COPIES = {"qkv": 20, "o": 30, "gate_up": 5, "down": 9}
"""So many that none is in the cache."""


def layers_of(name: str, matrix: str) -> list[Any]:
    out_features, in_features, _ = MATRICES[matrix]
    layer_kind = importlib.import_module("humming.layer").HummingLayer
    weight = torch.randn(out_features, in_features, device=CUDA).bfloat16()
    layers = []
    for _ in range(NUM_COPIES[matrix]):
        layer = layer_kind(
            shape_n=out_features,
            shape_k=in_features,
            weight_config=dict(WEIGHTS[name]),
            torch_dtype=torch.bfloat16,
        ).to(CUDA)
        layer.load_from_unquantized(weight)
        layer.transform()
        layers.append(layer)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(CUDA))
    for name in arguments.formats:
        taken: dict[int, float] = dict.fromkeys(arguments.rows, 0.0)
        for matrix in MATRICES:
            try:
                layers = layers_of(name, matrix)
                for num_rows in arguments.rows:
                    x = inputs_of(matrix, num_rows)
                    one = seconds([partial(layer, x) for layer in layers])
                    taken[num_rows] += one
                    print(f"humming {name:8} {matrix:8} rows {num_rows:5} {one * 1e6:7.1f}")
            except Exception as error:  # noqa: BLE001 - another's kernels fail in ways of their own
                print(f"humming {name} {matrix}: {error!r}", flush=True)
                taken = dict.fromkeys(taken, float("nan"))
        for num_rows, layer_s in taken.items():
            print(f"humming {name:8} layer    rows {num_rows:5} {layer_s * 1e6:7.1f}", flush=True)


if __name__ == "__main__":
    main()
