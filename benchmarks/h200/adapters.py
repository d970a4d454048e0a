"""Decode with adapters beside decode without: tokens/s of a full batch.

    python3 -m benchmarks.h200.adapters CONFIG_JSON [--streams 64] [--adapters 8] [--rank 32]

Random weights of the config's shapes and adapters of random numbers on all projections, written to
a folder of their own. One engine with slots for all of them: batches in which every stream has an
adapter, by turns, batches in which half have one, and batches without. Then an engine without
slots. Each engine has a process of its own, whose end leaves the GPU's memory to the next one.
Counted from the moment when every stream has its first token until the first has its last; the
best of the repeats. One line of JSON a measurement.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.full_batch import tokens_a_second
from workers.adapters.folder import adapter_at
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.config import EngineConfig
from workers.engine.engine import Engine


def write_adapter(folder: Path, info: AdapterInfo, rank: int, seed: int) -> Path:
    """On all modules that the model lets adapters change."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_inputs, num_outputs) in info.modules.items():
        for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            noise = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = noise.bfloat16()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def build(folder: str, max_loras: int, rank: int) -> Engine:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        max_context_len=MAX_CONTEXT_LEN,
        gpu_memory_fraction=MEMORY_FRACTION,
        max_running_requests=MAX_RUNNING_REQUESTS,
        enable_prefix_cache=False,
        max_loras=max_loras,
        max_lora_rank=rank,
    )
    engine = Engine.from_config(config)
    while engine.prepare_while_idle():
        pass
    return engine


def measure(
    engine: Engine,
    name: str,
    adapters: Sequence[AdapterRef | None],
    arguments: argparse.Namespace,
) -> None:
    runs = [
        tokens_a_second(engine, arguments.streams, arguments.tokens, adapters)
        for _ in range(1 + arguments.repeats)
    ]
    # The first one warms up.
    line = {"name": name, "streams": arguments.streams, "tokens_a_second": runs[1:]}
    print(json.dumps({**line, "best": max(runs[1:])}), flush=True)


def measure_adapters(folder: Path, scratch: Path, arguments: argparse.Namespace) -> None:
    """An engine with a slot for every adapter."""
    engine = build(str(folder), arguments.adapters, arguments.rank)
    try:
        info = engine.info.adapters
        assert info is not None
        refs = [
            adapter_at(str(n), write_adapter(scratch / str(n), info, arguments.rank, n), info)
            for n in range(arguments.adapters)
        ]
        half = [one for ref in refs for one in (ref, None)]
        for name, worn in (("every stream", refs), ("half of them", half), ("none", [None])):
            measure(engine, name, worn, arguments)
    finally:
        engine.close()


def measure_without_slots(folder: Path, scratch: Path, arguments: argparse.Namespace) -> None:
    engine = build(str(folder), 0, arguments.rank)
    try:
        measure(engine, "without slots", [None], arguments)
    finally:
        engine.close()


def run_apart(
    measure_engine: Callable[[Path, Path, argparse.Namespace], None],
    folder: Path,
    scratch: Path,
    arguments: argparse.Namespace,
) -> None:
    """In a process of its own, to its end. Raises SystemExit where it fails."""
    process = multiprocessing.get_context("spawn").Process(
        target=measure_engine, args=(folder, scratch, arguments)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = scratch / "model"
        folder.mkdir()
        (folder / "config.json").write_text(Path(arguments.config).read_text())
        for measure_engine in (measure_adapters, measure_without_slots):
            run_apart(measure_engine, folder, scratch, arguments)


if __name__ == "__main__":
    main()
