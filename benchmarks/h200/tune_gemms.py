"""Times every GEMM on the shapes of some models and writes the choices of this GPU.

    python3 -m benchmarks.h200.tune_gemms OUT.json benchmarks/h200/models/*.json --tp 1

OUT.json is what workers/layers/gemm/tuned/ holds for a GPU; what it has already is kept and not
measured again. Weights are random. One line a choice; at the end what each model's GEMMs take in a
step by cuBLAS's own choice and by these. Kernels are compiled by many processes beforehand. Where
choices are shipped for a like GPU only candidates like them are timed; --every times all. Shapes
that --seconds leaves unfinished are not in OUT.json in the end.
"""

import argparse
import json
import logging
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from workers.layers.gemm.build import GemmBuilder
from workers.layers.gemm.choice import MIN_MEASURED_ELEMENTS
from workers.layers.gemm.configs import (
    TOKEN_BUCKETS,
    Choices,
    GemmConfig,
    GemmShape,
    Role,
    block_tokens,
)
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.gemm.measure import Contest, Measured, measure
from workers.layers.gemm.skinny import prefetch_bytes
from workers.layers.gemm.table import (
    SHIPPED_FOLDER,
    Table,
    dump_choices,
    read_choices,
    shipped_tables,
)

_WEIGHT_BYTES = 512 << 20
_MAX_WEIGHTS = 6
_NUM_COMPILERS = 14
_DTYPE = torch.bfloat16
_DEVICE = torch.device("cuda", 0)
_PARTS = ("qkv", "o", "gate_up", "down", "head")

logger = logging.getLogger("tune_gemms")


def shapes_of(config: dict[str, Any], tp: int) -> list[GemmShape]:
    """The GEMMs of a Llama-family model on one of tp ranks, in the order of _PARTS."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"] // tp
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    qkv = (num_heads + 2 * config["num_key_value_heads"]) * head_dim // tp
    # A rank's partial products have to be summed up before other ranks' are added.
    role: Role = "split" if tp == 1 else "whole"
    return [
        GemmShape(qkv, hidden, "split"),
        GemmShape(hidden, num_heads * head_dim // tp, role),
        GemmShape(2 * intermediate, hidden, "gated"),
        GemmShape(hidden, intermediate, role),
        GemmShape(-(-config["vocab_size"] // tp), hidden, "whole"),
    ]


def random_weights(shape: GemmShape) -> list[torch.Tensor]:
    num_bytes = 2 * shape.out_features * shape.in_features
    count = max(1, min(_MAX_WEIGHTS, -(-_WEIGHT_BYTES // num_bytes)))
    size = (shape.out_features, shape.in_features)
    return [torch.randn(size, dtype=_DTYPE, device=_DEVICE) for _ in range(count)]


def compile_kernels(work: tuple[GemmShape, list[tuple[int, GemmConfig]]]) -> None:
    """Run each once, so that the next process finds it compiled."""
    shape, calls = work
    weight = torch.zeros((shape.out_features, shape.in_features), dtype=_DTYPE, device=_DEVICE)
    builder = GemmBuilder.on(_DEVICE)
    for num_tokens, config in calls:
        builder.build(config, weight, shape.role)(weight[:num_tokens], weight)
    torch.cuda.synchronize()


def compile_all(todo: Iterable[tuple[GemmShape, list[int]]], guesses: Table) -> None:
    works = []
    builder = GemmBuilder.on(_DEVICE)
    for shape, buckets in todo:
        kernels = {}
        contest = Contest(shape, (), guesses.get(str(shape), {}))
        for num_tokens in buckets:
            for config in contest.trial(num_tokens, builder).triton_configs():
                kernels[_kernel(shape, num_tokens, config)] = (num_tokens, config)
        calls = list(kernels.values())
        works += [(shape, calls[first::4]) for first in range(4) if calls[first::4]]
    run_compilers(works)


def run_compilers(works: list[tuple[GemmShape, list[tuple[int, GemmConfig]]]]) -> None:
    if not works:
        return
    with multiprocessing.get_context("spawn").Pool(min(len(works), _NUM_COMPILERS)) as pool:
        pool.map(compile_kernels, works, chunksize=1)


def _kernel(shape: GemmShape, num_tokens: int, config: GemmConfig) -> tuple[object, ...]:
    """What is compiled alike has the same."""
    splits = config.num_splits if config.kind == "tiled" else min(config.num_splits, 2)
    num_rows, k = shape.out_features * config.num_splits, shape.in_features // config.num_splits
    ahead = prefetch_bytes(config.kind, num_rows, k)
    return block_tokens(num_tokens), ahead, replace(config, num_splits=splits)


def report(
    model: str, shapes: list[GemmShape], num_layers: int, timings: dict[str, dict[int, Measured]]
) -> None:
    """A step's GEMMs with their neighbours, for the token counts measured now for all of them.

    The head counts only where it is measured.
    """
    for num_tokens in TOKEN_BUCKETS:
        counted = [shape for shape in shapes if num_tokens in shape.buckets]
        rows = [timings.get(str(shape), {}).get(num_tokens) for shape in counted]
        measured = [row for row in rows if row is not None]
        if len(measured) < len(rows):
            continue
        counts = [1 if shape is shapes[-1] else num_layers for shape in counted]
        ours = sum(n * row.seconds for n, row in zip(counts, measured, strict=True))
        cublas = sum(n * row.cublas_seconds for n, row in zip(counts, measured, strict=True))
        values = num_tokens, cublas * 1e6, ours * 1e6
        logger.info("step of %s, %d tokens: cuBLAS %.0f us, chosen %.0f us", model, *values)


def shipped_guesses() -> dict[str, Choices]:
    """What was chosen on the nearest GPU that choices are shipped for, this one included."""
    limits = DeviceLimits.of(_DEVICE)
    name = torch.cuda.get_device_name(_DEVICE)
    tables = shipped_tables(SHIPPED_FOLDER, name, limits.compute_capability)
    return dict(tables.known or tables.guessed)


def whole(choices: dict[str, Choices]) -> dict[str, Choices]:
    """Shapes with a choice for every bucket: the others can only be measured again."""
    cut = [shape for shape, done in choices.items() if len(done) < len(TOKEN_BUCKETS)]
    if cut:
        logger.warning("left out, for want of time: %s", ", ".join(cut))
    return {shape: done for shape, done in choices.items() if shape not in cut}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--parts", choices=_PARTS, nargs="*", default=_PARTS, help="only these")
    parser.add_argument("--tokens", type=int, nargs="*", help="only these buckets")
    parser.add_argument("--seconds", type=float, default=3600.0, help="measure for so long")
    parser.add_argument("--every", action="store_true", help="time every candidate")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.getLogger("workers").setLevel(logging.DEBUG)
    choices = read_choices(arguments.out)
    models = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.configs]
    shapes = dict.fromkeys(
        shape
        for model in models
        for part, shape in zip(_PARTS, shapes_of(model, arguments.tp), strict=True)
        if part in arguments.parts
        and shape.out_features * shape.in_features >= MIN_MEASURED_ELEMENTS
    )
    guesses: Table = {} if arguments.every else shipped_guesses()
    todo = []
    for shape in shapes:
        done = choices.setdefault(str(shape), {})
        done |= {n: None for n in TOKEN_BUCKETS if n not in shape.buckets}
        wanted = [n for n in shape.buckets if not arguments.tokens or n in arguments.tokens]
        todo.append((shape, [n for n in wanted if n not in done]))
    start_s = time.monotonic()
    compile_all(todo, guesses)
    logger.info("kernels compiled in %.1f s", time.monotonic() - start_s)
    timings: dict[str, dict[int, Measured]] = {}
    for index, (shape, buckets) in enumerate(todo):
        left_s = start_s + arguments.seconds - time.monotonic()
        share_s = left_s / (len(todo) - index)
        contest = Contest(shape, random_weights(shape), guesses.get(str(shape), {}))
        new = measure(contest, buckets, GemmBuilder.on(_DEVICE), share_s)
        timings[str(shape)] = new
        choices[str(shape)] |= {num_tokens: best.config for num_tokens, best in new.items()}
        arguments.out.write_text(dump_choices(choices), encoding="utf-8")
    logger.info("measured in %.1f s", time.monotonic() - start_s)
    if not arguments.tokens:
        arguments.out.write_text(dump_choices(whole(choices)), encoding="utf-8")
    for path, model in zip(arguments.configs, models, strict=True):
        if len(arguments.parts) < len(_PARTS):
            break
        model_shapes = shapes_of(model, arguments.tp)
        report(path.stem, model_shapes, model["num_hidden_layers"], timings)


if __name__ == "__main__":
    main()
