"""Fills a native model's parameters, from a checkpoint or with seeded noise.

Every parameter is written exactly once: a tensor that is missing, unknown or of another shape is an
error, found before anything is read.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from workers.errors import ModelLoadError
from workers.layers.formats.layer import StoredTensors
from workers.layers.sharding import ShardContext, WeightSlot
from workers.loading.checkpoint import LazyTensor, SafetensorsCheckpoint
from workers.loading.kv_scales import is_kv_scale
from workers.loading.weight_lanes import WeightLane
from workers.models.base import NativeCausalLM

OnProgress = Callable[[int, int], None]
_MAX_NAMES_SHOWN = 5


def shown(names: Collection[str]) -> str:
    """The first few of them, in words."""
    first = sorted(names)[:_MAX_NAMES_SHOWN]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _check_names(model: NativeCausalLM, stored: StoredTensors, found: set[str]) -> None:
    wanted = set(stored.slots)
    missing = wanted - found
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors: {shown(missing)}")
    unexpected = {
        name
        for name in found - wanted
        if name not in model.tied_weights
        and not model.is_redundant_weight(name)
        and name not in stored.unread
        and not is_kv_scale(name)
    }
    if unexpected:
        raise ModelLoadError(
            f"the checkpoint has {len(unexpected)} tensors that the model has no use for: "
            f"{shown(unexpected)}"
        )


def check_shapes(slots: Mapping[str, WeightSlot], tensors: Mapping[str, LazyTensor]) -> None:
    """Raises ModelLoadError for the first tensor that does not go where its name says."""
    for name, slot in slots.items():
        obstacle = slot.obstacle(tensors[name].shape, tensors[name].dtype)
        if obstacle:
            raise ModelLoadError(f"{name} {obstacle}")


def _check_tied(model: NativeCausalLM, checkpoint: SafetensorsCheckpoint) -> None:
    for name, original in model.tied_weights.items():
        if name not in checkpoint.names:
            continue
        if not torch.equal(checkpoint.read(name), checkpoint.read(original)):
            raise ModelLoadError(
                f"the config ties {name} to {original}, but the checkpoint has both and they "
                "differ; set tie_word_embeddings to false in config.json if they are separate"
            )


def load_checkpoint(
    model: NativeCausalLM,
    stored: StoredTensors,
    checkpoint: SafetensorsCheckpoint,
    lanes: Sequence[WeightLane],
    on_progress: OnProgress,
) -> None:
    """Copy this rank's slices into the model, as many tensors at a time as there are lanes.

    Raises ModelLoadError, then nothing can be served. on_progress(bytes_done, bytes_total) counts
    whole checkpoint tensors, also where a rank reads but a part of them; only the calling thread
    calls it.
    """
    slots = stored.slots
    _check_names(model, stored, checkpoint.names)
    _check_tied(model, checkpoint)
    done = 0
    on_progress(done, checkpoint.total_bytes)
    with checkpoint.opened(slots) as tensors:
        check_shapes(slots, tensors)
        for num_bytes in _load_all(slots, tensors, lanes):
            done += num_bytes
            on_progress(done, checkpoint.total_bytes)
    on_progress(checkpoint.total_bytes, checkpoint.total_bytes)


def _load_all(
    slots: Mapping[str, WeightSlot],
    tensors: Mapping[str, LazyTensor],
    lanes: Sequence[WeightLane],
) -> Iterator[int]:
    """Load every slot; yields the bytes of each as it is in place. Raises a lane's first error."""
    free_lanes: SimpleQueue[WeightLane] = SimpleQueue()
    for lane in lanes:
        free_lanes.put(lane)

    def load_one(name: str) -> int:
        with _taken(free_lanes) as lane:
            lane.load(slots[name], tensors[name])
            slots[name].settle()
        return tensors[name].num_bytes

    # The largest first, lest one lane is left with the vocabulary when all others have ended.
    names = sorted(slots, key=lambda name: tensors[name].num_bytes, reverse=True)
    with ThreadPoolExecutor(len(lanes), thread_name_prefix="tessera-load") as pool:
        loads = [pool.submit(load_one, name) for name in names]
        try:
            for load in as_completed(loads):
                yield load.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _taken(lanes: SimpleQueue[WeightLane]) -> Iterator[WeightLane]:
    lane = lanes.get()
    try:
        yield lane
    finally:
        lanes.put(lane)


def fill_with_noise(
    stored: StoredTensors, shard: ShardContext, seed: int, on_progress: OnProgress
) -> None:
    """Dummy weights straight on the device. A seed makes one model, whatever the number of ranks.

    Peak memory: one whole tensor above the rank's own parameters.
    """
    slots, generator = stored.slots, torch.Generator(shard.device)
    for done, (name, slot) in enumerate(slots.items()):
        on_progress(done, len(slots))
        generator.manual_seed(seed ^ zlib.crc32(name.encode()))
        slot.load(slot.dummy(name, generator, shard.dtype))
        slot.settle()
    on_progress(len(slots), len(slots))
