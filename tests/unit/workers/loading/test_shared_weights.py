"""What replicas of a node share: the copy they read, its pages in the page cache, its memory."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.slow_copies import start_process
from tests.fakes.tiny_models import NATIVE, THROUGH_TRANSFORMERS, TinyModel, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel, load_model
from workers.parallel.group import SingleRank
from workers.sampling.params import SamplingParams

CPU = torch.device("cpu")
# Large enough that read-ahead beyond the weights and other small reads do not matter.
BIG = TinyModel("llama", {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4})


class LastOfTwoRanks(SingleRank):
    rank = 1
    size = 2


def load(folder: Path, tp: SingleRank | None = None, **changes: Any) -> LoadedModel:
    config = EngineConfig(model=str(folder), **changes)
    return load_model(config, tp or SingleRank(), CPU, torch.float32)


def mapped_ranges(folder: Path) -> list[range]:
    """Addresses at which this process maps files of the folder."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith(f"{folder}/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append(range(start, end))
    return ranges


def mapped_names(loaded: LoadedModel) -> set[str]:
    """Parameters that are pages of a file of the lease."""
    ranges = mapped_ranges(loaded.lease.folder)
    return {
        name
        for name, parameter in loaded.model.named_parameters()
        if any(parameter.data_ptr() in one for one in ranges)
    }


def all_equal(one: LoadedModel, other: LoadedModel) -> bool:
    weights = dict(other.model.named_parameters())
    return all(
        torch.equal(parameter, weights[name]) for name, parameter in one.model.named_parameters()
    )


def generate(config: EngineConfig) -> list[int]:
    engine = Engine.from_config(config)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        return list(engine.generate([[5, 7, 11]], sampling)[0].token_ids)
    finally:
        engine.close()


@pytest.mark.parametrize("tiny", [NATIVE["qwen2"], THROUGH_TRANSFORMERS["olmo2"]])
def test_an_engine_through_the_cache_says_the_same(tmp_path: Path, tiny: TinyModel) -> None:
    folder, cache = save_tiny_model(tiny, tmp_path / "model"), tmp_path / "cache"
    small = EngineConfig(model=str(folder), num_pages=64, page_size=16)
    through = EngineConfig(
        model=str(folder), num_pages=64, page_size=16, weights_cache_dir=str(cache)
    )
    assert generate(small) == generate(through) == generate(through)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_the_cache_has_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights_cache_bytes"):
        EngineConfig(weights_cache_bytes=0)
    folder = save_tiny_model(NATIVE["qwen2"], tmp_path / "model")
    with pytest.raises(ConfigError, match="weights_cache_bytes=10 is less than"):
        load(folder, weights_cache_dir=str(tmp_path / "cache"), weights_cache_bytes=10)


def test_dummy_weights_are_not_copied(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["qwen2"], tmp_path / "model")
    load(folder, load_format="dummy", weights_cache_dir=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_progress_runs_through_copying_and_loading(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path / "model", max_shard_size="100KB")
    config = EngineConfig(model=str(folder), weights_cache_dir=str(tmp_path / "cache"))
    shares: list[list[float]] = []
    for _ in range(2):
        seen: list[float] = []
        load_model(config, SingleRank(), CPU, torch.float32, lambda d, of, s=seen: s.append(d / of))
        shares.append(seen)
    for seen in shares:
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
    assert any(abs(share - 0.5) < 0.01 for share in shares[0])
    assert shares[1][0] == 0.0


@pytest.mark.parametrize("name", ["llama3", "llama3_tied", "llama_biased", "qwen3"])
def test_weights_that_lie_as_they_are_used_are_the_pages_of_the_copy(
    name: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(NATIVE[name], tmp_path / "model")
    plain, through = load(folder), load(folder, weights_cache_dir=str(tmp_path / "cache"))
    merged = {
        parameter
        for parameter, _ in through.model.named_parameters()
        if "qkv_proj" in parameter or "gate_up_proj" in parameter
    }
    everything = {parameter for parameter, _ in through.model.named_parameters()}
    assert merged
    assert mapped_names(through) == everything - merged
    assert all_equal(through, plain)


def test_a_ranks_share_is_mapped_where_it_is_one_piece(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama_biased"], tmp_path / "model")
    plain = load(folder, LastOfTwoRanks(), tp_size=2)
    through = load(folder, LastOfTwoRanks(), tp_size=2, weights_cache_dir=str(tmp_path / "cache"))
    mapped = mapped_names(through)
    assert "model.norm.weight" in mapped
    # Columns of a matrix are no piece of it, and the padded vocabulary's last rows are in no file.
    assert not {"model.layers.0.self_attn.o_proj.weight", "lm_head.weight"} & mapped
    assert all_equal(through, plain)


def test_weights_of_another_dtype_are_each_ones_own(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    through = load(folder, weights_cache_dir=str(tmp_path / "cache"))
    assert mapped_names(through) == set()
    assert all_equal(through, load(folder))


def test_an_operators_own_folder_is_never_mapped(tmp_path: Path) -> None:
    """It may be written to while it is served, which would change, or end, what maps it."""
    assert mapped_names(load(save_tiny_model(NATIVE["llama3"], tmp_path / "model"))) == set()


def bytes_from_disk() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def bytes_read_to_load(folder: Path, **changes: Any) -> int:
    """In a process of its own, every weight looked at."""

    def work(pipe: Connection) -> None:
        before = bytes_from_disk()
        loaded = load(folder, **changes)
        float(sum(parameter.sum() for parameter in loaded.model.parameters()))
        pipe.send(bytes_from_disk() - before)

    process, pipe = start_process(work)
    num_bytes: int = pipe.recv()
    process.join()
    return num_bytes


@pytest.mark.parametrize("has_cache", [False, True], ids=["folder", "copy"])
def test_only_the_first_process_reads_from_disk(tmp_path: Path, has_cache: bool) -> None:
    folder, changes = save_tiny_model(BIG, tmp_path / "model"), {}
    file = folder / "model.safetensors"
    if has_cache:
        changes["weights_cache_dir"] = str(tmp_path / "cache")
        file = load(folder, **changes).lease.folder / file.name
    size = file.stat().st_size
    drop_from_page_cache(file)
    first, second = (bytes_read_to_load(folder, **changes) for _ in range(2))
    if first == 0:
        pytest.skip(f"{tmp_path} is on no disk")
    assert first > 0.9 * size
    assert second < 0.02 * size
