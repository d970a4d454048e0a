"""What a second replica of a node costs, with a weights cache and without: disk, seconds, memory.

    python -m benchmarks.weights_cache --gigabytes 1 --dtype bfloat16

Writes a Llama checkpoint of that size, drops it from the page cache, and lets processes load it on
the CPU one after another; all stay alive until the last has loaded. Floor of disk bytes: the
checkpoint once, then nothing. Own memory is anonymous (Pss_Anon of smaps_rollup) and each replica's
again; mapped memory (Pss_File) is the page cache's, there once for all, and counted 1/n in each of
the n processes that map it. Loading ends when every weight has been looked at.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers.config import EngineConfig
from workers.loading.loader import load_model, resolve_dtype
from workers.parallel.group import SingleRank

_MEMORY = ("own_bytes", "mapped_bytes")
_CPU = torch.device("cpu")
# Llama-3.1-8B's proportions at a third of its width.
_SHAPE = {"hidden_size": 1280, "intermediate_size": 4480, "num_attention_heads": 10,
          "num_key_value_heads": 2, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
_LAYER_PARAMETERS = 1280 * (1280 * 2 + 256 * 2 + 4480 * 3)
_VOCABULARY_PARAMETERS = 2 * 1280 * 32000


@dataclass(frozen=True, slots=True)
class Loaded:
    """One process. disk_bytes: read_bytes of /proc/self/io. Memory: while all are alive."""

    seconds: float
    disk_bytes: int
    own_bytes: int
    mapped_bytes: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint, bfloat16")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--folder", default=None, help="a disk, for the checkpoint and the cache")
    return parser.parse_args()


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    parameters = gigabytes * 1e9 / 2 - _VOCABULARY_PARAMETERS
    num_layers = max(1, round(parameters / _LAYER_PARAMETERS))
    config = LlamaConfig(**_SHAPE, num_hidden_layers=num_layers, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(folder)


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def _memory() -> tuple[int, int]:
    """Bytes of this process's own and of mapped memory."""
    own, mapped = (_field("/proc/self/smaps_rollup", name) for name in ("Pss_Anon", "Pss_File"))
    return own << 10, mapped << 10


def load_and_tell(config: EngineConfig, pipe: Connection) -> None:
    """A replica: loads, looks at every weight, tells, and tells its memory when it is asked."""
    torch.set_num_threads(1)
    disk_bytes, start_s = _field("/proc/self/io", "read_bytes"), time.perf_counter()
    before = _memory()
    model = load_model(config, SingleRank(), _CPU, resolve_dtype(config, _CPU)).model
    float(sum(parameter.sum() for parameter in model.parameters()))
    seconds = time.perf_counter() - start_s
    pipe.send((seconds, _field("/proc/self/io", "read_bytes") - disk_bytes))
    pipe.recv()
    pipe.send([now - then for now, then in zip(_memory(), before, strict=True)])
    pipe.recv()


def measure(config: EngineConfig, num_replicas: int) -> list[Loaded]:
    context = multiprocessing.get_context("spawn")
    pipes, processes, told = [], [], []
    for _ in range(num_replicas):
        here, there = context.Pipe()
        process = context.Process(target=load_and_tell, args=(config, there))
        process.start()
        pipes.append(here)
        processes.append(process)
        told.append(here.recv())
    for pipe in pipes:
        pipe.send("memory")
    memory = [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    return [Loaded(*one, *bytes_of) for one, bytes_of in zip(told, memory, strict=True)]


def show(title: str, checkpoint_bytes: int, replicas: Sequence[Loaded]) -> None:
    print(f"\n{title} (checkpoint {checkpoint_bytes / 1e9:.2f} GB)")
    print("| replica | load s | from disk GB | own memory GB | mapped GB |")
    print("|---|---|---|---|---|")
    for number, one in enumerate(replicas, 1):
        print(
            f"| {number} | {one.seconds:.2f} | {one.disk_bytes / 1e9:.3f} "
            f"| {one.own_bytes / 1e9:.2f} | {one.mapped_bytes / 1e9:.2f} |"
        )
    own, mapped = (sum(getattr(one, name) for one in replicas) / 1e9 for name in _MEMORY)
    print(f"| all | | | {own:.2f} | {mapped:.2f} |", flush=True)


def main() -> None:
    arguments = parse_arguments()
    results = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, cache = Path(name) / "model", Path(name) / "cache"
        write_checkpoint(folder, arguments.gigabytes)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for title, cache_dir in (("model folder", None), ("weights cache", str(cache))):
            config = EngineConfig(
                model=str(folder), dtype=arguments.dtype, weights_cache_dir=cache_dir
            )
            drop_from_page_cache(Path(name))
            replicas = measure(config, arguments.replicas)
            show(title, size, replicas)
            results[title] = [asdict(one) for one in replicas]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
