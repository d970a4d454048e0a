"""Weights from safetensors files to the device: GB/s by number of lanes, against the plain copy.

    python3 -m benchmarks.h200.load_time benchmarks/h200/models/llama-3.1-8b.json --layers 16

Writes a checkpoint of the model's shapes, cut to --layers layers, in --shards files and loads it:
with the page cache warm, as it is after a download, and, with --cold, after dropping the files
from it. "pageable" hands the mapped file to the driver without a staging buffer.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.config import EngineConfig
from workers.layers.formats.layer import unquantised
from workers.layers.sharding import weight_slots
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.loader import load_model
from workers.loading.weight_lanes import HostLane, WeightLane, make_lanes
from workers.loading.weights import load_checkpoint
from workers.models.base import NativeCausalLM
from workers.parallel.group import SingleRank

_DTYPE = torch.bfloat16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--lanes", default="1,2,4,8", help="comma-separated")
    parser.add_argument("--cold", action="store_true", help="also with the page cache dropped")
    parser.add_argument("--folder", default=None, help="where the checkpoint is written")
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args()


def build(folder: Path, device: torch.device) -> NativeCausalLM:
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16")
    model = load_model(config, SingleRank(), device, _DTYPE).model
    if not isinstance(model, NativeCausalLM):
        raise SystemExit("only native models load through lanes")
    return model


def write_checkpoint(folder: Path, model: NativeCausalLM, num_shards: int) -> int:
    """Random weights in files of about equal size; returns their bytes."""
    slots = weight_slots(model)
    names = sorted(slots)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: _noise(slots[name].shape) for name in mine}, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return SafetensorsCheckpoint(folder).total_bytes


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(shape, dtype=_DTYPE, device=device).cpu()


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load_seconds(folder: Path, model: NativeCausalLM, lanes: Sequence[WeightLane]) -> float:
    start_s = time.perf_counter()
    load_checkpoint(
        model, unquantised(model), SafetensorsCheckpoint(folder), lanes, lambda done, total: None
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def checksum(model: NativeCausalLM) -> tuple[float, ...]:
    return tuple(float(p.double().sum()) for p in model.parameters())


def run(arguments: argparse.Namespace, folder: Path) -> None:
    device = torch.device(arguments.device)
    config = json.loads(arguments.config.read_text()) | {"num_hidden_layers": arguments.layers}
    (folder / "config.json").write_text(json.dumps(config))
    model = build(folder, device)
    start_s = time.perf_counter()
    num_bytes = write_checkpoint(folder, model, arguments.shards)
    written_s = time.perf_counter() - start_s
    print(f"{num_bytes / 1e9:.2f} GB in {arguments.shards} files, written in {written_s:.1f} s")
    ways: dict[str, Sequence[WeightLane]] = {"pageable": [HostLane()]}
    for lanes in map(int, arguments.lanes.split(",")):
        ways[f"{lanes} lanes"] = make_lanes(_DTYPE, device, lanes)
    want = None
    for name, lanes_of_way in ways.items():
        seconds = load_seconds(folder, model, lanes_of_way)
        got = checksum(model)
        want = want or got
        note = "" if got == want else "  DIFFERS from the first way"
        print(f"{name:>10}: {seconds:6.2f} s  {num_bytes / seconds / 1e9:6.1f} GB/s{note}")
    if arguments.cold:
        drop_from_page_cache(folder)
        seconds = load_seconds(folder, model, lanes_of_way)
        print(f"{'cold':>10}: {seconds:6.2f} s  {num_bytes / seconds / 1e9:6.1f} GB/s ({name})")


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(arguments, Path(folder))


if __name__ == "__main__":
    main()
