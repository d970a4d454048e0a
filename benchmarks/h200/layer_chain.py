"""What one token's decode step takes with some GEMMs: all layers in one graph, attention left out.

    python3 -m benchmarks.h200.layer_chain benchmarks/h200/models/llama-3.1-8b.json

Distinct weights for every layer; norm, qkv, a reader of it in attention's stead, o, norm, gate_up
with its activation, down. First the shipped choices; then, role by role, each variant in its place;
then how much to prefetch. Microseconds a layer, medians.
"""

import argparse
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.tune_gemms import run_compilers, shapes_of
from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.gemm import skinny
from workers.layers.gemm.build import Activate, GemmBuilder, Multiply
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import Config, GemmConfig, GemmShape
from workers.layers.gemm.device_limits import HOPPER

_DTYPE = torch.bfloat16
_DEVICE = torch.device("cuda", 0)
_NUM_REPLAYS = 15
_ROLES = ("qkv", "o", "gate_up", "down")
logger = logging.getLogger("layer_chain")

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Layers:
    """weights: one list a role, in the order of _ROLES. x: (n, hidden_size).

    attended: (n, heads * head_dim), what o multiplies: always the same.
    """

    weights: Sequence[Sequence[torch.Tensor]]
    x: torch.Tensor
    attended: torch.Tensor
    scale: torch.Tensor

    def run(self, gemms: Sequence[Multiply | Activate]) -> None:
        qkv, o, gate_up, down = gemms
        residual = self.x.clone()
        hidden = rms_norm(residual, self.scale, 1e-5)
        for qkv_weight, o_weight, gate_up_weight, down_weight in zip(*self.weights, strict=True):
            # Reads all partial products, as rotation does.
            gate_and_mul(qkv(hidden, qkv_weight), self.x.dtype, "silu")
            hidden = add_rms_norm_(o(self.attended, o_weight), residual, self.scale, 1e-5)
            delta = down(gate_up(hidden, gate_up_weight), down_weight)
            hidden = add_rms_norm_(delta, residual, self.scale, 1e-5)


def seconds_of(step: Step) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    times: list[float] = []
    with torch.cuda.stream(stream):
        step()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        graph.replay()
        for _ in range(_NUM_REPLAYS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            milliseconds: float = start.elapsed_time(stop)
            times.append(milliseconds / 1e3)
    graph.reset()
    return statistics.median(times)


_GATED_TILES = (
    (64, 128, 4, 4),
    (64, 64, 6, 4),
    (32, 128, 4, 4),
    (32, 128, 3, 4),
    (32, 256, 3, 4),
    (16, 256, 4, 4),
    (16, 256, 3, 2),
    (128, 64, 5, 8),
)
_GATED_ROWS = ((2, 1024, 4), (1, 2048, 4), (4, 1024, 8), (2, 2048, 8), (4, 512, 4))
_TILES = (
    (64, 128, 6, 4),
    (64, 256, 3, 4),
    (32, 256, 4, 4),
    (32, 128, 6, 4),
    (16, 512, 3, 4),
    (128, 64, 6, 4),
)
_ROWS = ((2, 1024, 4), (4, 1024, 4), (8, 512, 4))
_SPLITS = (1, 2, 4, 8)
_MIN_PROGRAMS, _MAX_PROGRAMS = 128, 1024


def variants(shape: GemmShape) -> list[GemmConfig]:
    """For one token."""
    if shape.role == "gated":
        configs = [GemmConfig("gated", r, k, 1, s, w) for r, k, s, w in _GATED_TILES]
        configs += [GemmConfig("gated_gemv", r, k, 1, 1, w) for r, k, w in _GATED_ROWS]
    else:
        configs = [
            GemmConfig("skinny", r, k, splits, s, w)
            for r, k, s, w in _TILES
            for splits in _SPLITS
            if _MIN_PROGRAMS <= shape.out_features // r * splits <= _MAX_PROGRAMS
        ]
        configs += [GemmConfig("gemv", r, k, 1, 1, w) for r, k, w in _ROWS]
    return [config for config in configs if config.fits(1, shape.in_features, HOPPER)]


def compile_variants(shapes: Sequence[GemmShape]) -> None:
    works = []
    for shape in shapes:
        calls = [(1, config) for config in variants(shape)]
        works += [(shape, calls[first::4]) for first in range(4) if calls[first::4]]
    run_compilers(works)


def sweep(layers: Layers, shapes: Sequence[GemmShape], chosen: list[Config]) -> list[Config]:
    """Role by role the best of its variants; the others keep what was best before."""
    builder = GemmBuilder.on(_DEVICE)
    num_layers = len(layers.weights[0])

    def us_a_layer(configs: Sequence[Config]) -> float:
        gemms = [
            builder.build(config, weights[0], shape.role)
            for config, weights, shape in zip(configs, layers.weights, shapes, strict=True)
        ]
        return seconds_of(lambda: layers.run(gemms)) / num_layers * 1e6

    best_us = us_a_layer(chosen)
    logger.info("shipped: %.2f us a layer", best_us)
    for role in (2, 3, 0, 1):
        rows = []
        for config in variants(shapes[role]):
            rows.append((us_a_layer([*chosen[:role], config, *chosen[role + 1 :]]), config))
        rows.sort(key=lambda row: row[0])
        shown = "; ".join(f"{config} {us:.2f}" for us, config in rows[:4])
        logger.info("%s (now %.2f): %s", _ROLES[role], best_us, shown.replace("GemmConfig", ""))
        if rows[0][0] < best_us:
            best_us, chosen[role] = rows[0][0], rows[0][1]
    for budget, most in ((0, 1024), (10, 1024), (40, 1024), (10, 4096), (20, 4096), (40, 4096)):
        skinny.PREFETCH_BUDGET_BYTES = budget << 20
        skinny.MAX_LINE_PREFETCH_BYTES = most
        us = us_a_layer(chosen)
        logger.info("prefetch %d MiB, at most %d bytes a row: %.2f", budget, most, us)
    return chosen


def random_layers(config: dict[str, Any], shapes: Sequence[GemmShape], num_tokens: int) -> Layers:
    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=_DTYPE, device=_DEVICE)

    num_layers = config["num_hidden_layers"]
    weights = [
        [random(shape.out_features, shape.in_features) * 0.02 for _ in range(num_layers)]
        for shape in shapes
    ]
    x = random(num_tokens, shapes[0].in_features)
    return Layers(weights, x, random(num_tokens, shapes[1].in_features), torch.ones_like(x[0]))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    shapes = shapes_of(config, 1)[: len(_ROLES)]
    compile_variants(shapes)
    known = GemmChooser.for_device(_DEVICE).known
    shipped = [known[str(shape)][1] for shape in shapes]
    best = sweep(random_layers(config, shapes, 1), shapes, shipped)
    logger.info("best: %s", best)


if __name__ == "__main__":
    main()
