"""Times every GEMM kernel on the shapes of some models and writes the choices of this GPU.

    python3 -m benchmarks.h200.tune_gemms OUT.json benchmarks/h200/models/*.json

OUT.json is what workers/layers/cuda/tuned/ holds for a GPU. Weights are random; one line a choice.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch

from workers.layers.cuda.gemm_choice import GemmShape, dump_choices, measure

_WEIGHT_BYTES = 512 << 20
_MAX_WEIGHTS = 6


def shapes_of(config: dict[str, Any]) -> list[GemmShape]:
    """The GEMMs of a Llama-family model on one rank."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    qkv = (num_heads + 2 * config["num_key_value_heads"]) * head_dim
    return [
        GemmShape(qkv, hidden, "split"),
        GemmShape(hidden, num_heads * head_dim, "split"),
        GemmShape(2 * intermediate, hidden, "gated"),
        GemmShape(hidden, intermediate, "split"),
        GemmShape(config["vocab_size"], hidden, "whole"),
    ]


def random_weights(shape: GemmShape) -> list[torch.Tensor]:
    num_bytes = 2 * shape.out_features * shape.in_features
    count = max(1, min(_MAX_WEIGHTS, -(-_WEIGHT_BYTES // num_bytes)))
    size = (shape.out_features, shape.in_features)
    return [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(count)]


def main() -> None:
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("workers").setLevel(logging.DEBUG)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path, nargs="+")
    arguments = parser.parse_args()
    choices = {}
    for path in arguments.configs:
        for shape in shapes_of(json.loads(path.read_text(encoding="utf-8"))):
            if str(shape) not in choices:
                choices[str(shape)] = measure(shape, random_weights(shape))
    arguments.out.write_text(dump_choices(choices), encoding="utf-8")


if __name__ == "__main__":
    main()
