"""How tensors travel: in bounded pieces, through a lane's buffer, several at a time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from workers.errors import ModelLoadError
from workers.layers import sharding
from workers.layers.formats.layer import unquantised
from workers.layers.sharding import ShardContext, copy_slice, weight_slots
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.model_folder import read_hf_config
from workers.loading.weight_lanes import HostLane, StagedTensor, make_lanes
from workers.loading.weights import load_checkpoint
from workers.models.llama import LlamaForCausalLM
from workers.models.llama_family import llama_family_spec
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")


class Recorder:
    """A TensorSource that notes how many elements each slice of it has."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.sizes = []

    def __getitem__(self, index):
        part = self._tensor[index]
        self.sizes.append(part.numel())
        return part


class StagingLane:
    """PinnedLane without a device."""

    def __init__(self, dtype, num_elements):
        self._buffer = torch.empty(num_elements, dtype=dtype)

    def load(self, slot, tensor):
        slot.load(StagedTensor(tensor, self._buffer))


class BrokenLane:
    def load(self, slot, tensor):
        raise ModelLoadError("the disk is gone")


class MeetingLane:
    """Returns from its first load only when another lane loads too."""

    def __init__(self, meeting):
        self._meeting = meeting
        self._has_met = False

    def load(self, slot, tensor):
        if not self._has_met:
            self._meeting.wait(timeout=10)
            self._has_met = True
        slot.load(tensor)


def empty_model(folder, dtype=torch.float32):
    spec = llama_family_spec(read_hf_config(folder))
    return LlamaForCausalLM(spec, 256, ShardContext(SingleRank(), dtype, CPU))


def loaded(folder, lanes, dtype=torch.float32, on_progress=lambda done, total: None):
    model = empty_model(folder, dtype)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_checkpoint(model, unquantised(model), SafetensorsCheckpoint(folder), lanes, on_progress)
    return dict(model.named_parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(NATIVE["llama3"], tmp_path, max_shard_size="100KB")


@pytest.mark.parametrize("rows", [slice(0, 100), slice(13, 77), slice(5, 6)])
@pytest.mark.parametrize("columns", [(), (slice(2, 9),)])
def test_pieces_are_bounded_and_make_the_whole(monkeypatch, rows, columns) -> None:
    monkeypatch.setattr(sharding, "MAX_PIECE_ELEMENTS", 50)
    source = Recorder(torch.randn(100, 16))
    want = source._tensor[(rows, *columns)]
    target = torch.full_like(want, torch.nan)
    copy_slice(target, source, rows, *columns)
    assert torch.equal(target, want)
    assert max(source.sizes) <= 50


def test_a_row_larger_than_a_piece_goes_alone(monkeypatch) -> None:
    monkeypatch.setattr(sharding, "MAX_PIECE_ELEMENTS", 10)
    source = Recorder(torch.randn(3, 16))
    target = torch.empty(3, 16)
    copy_slice(target, source, slice(0, 3))
    assert torch.equal(target, source._tensor)
    assert source.sizes == [16, 16, 16]


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_slices_are_the_source_in_the_buffers_dtype(source_dtype, dtype) -> None:
    source = torch.randn(40, 30).to(source_dtype)
    buffer = torch.empty(600, dtype=dtype)
    staged = StagedTensor(source, buffer)
    assert staged.shape == source.shape
    for index in ((slice(0, 20),), (slice(3, 40), slice(10, 20))):
        part = staged[index]
        assert part.data_ptr() == buffer.data_ptr()
        assert torch.equal(part, source[index].to(dtype))


def test_a_slice_that_exceeds_the_buffer_is_handed_on() -> None:
    source = torch.randn(40, 30)
    assert torch.equal(StagedTensor(source, torch.empty(100))[(slice(0, 40),)], source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_of_loading_gives_the_same_parameters(folder, dtype) -> None:
    want = loaded(folder, [HostLane()], dtype)
    assert all(parameter.isfinite().all() for parameter in want.values())
    ways = {
        "parallel": [HostLane() for _ in range(5)],
        "staged": [StagingLane(dtype, 1 << 16) for _ in range(3)],
        "beyond the stage": [StagingLane(dtype, 70)],
        "made": make_lanes(dtype, CPU, 2),
    }
    for name, lanes in ways.items():
        got = loaded(folder, lanes, dtype)
        assert all(torch.equal(got[key], want[key]) for key in want), name


def test_lanes_work_at_the_same_time(folder) -> None:
    meeting = threading.Barrier(3)
    loaded(folder, [MeetingLane(meeting) for _ in range(3)])


def test_only_the_caller_hears_of_progress(folder) -> None:
    threads = set()
    loaded(
        folder,
        [HostLane() for _ in range(4)],
        on_progress=lambda done, total: threads.add(threading.get_ident()),
    )
    assert threads == {threading.get_ident()}


def test_an_error_in_a_lane_ends_loading(folder) -> None:
    with pytest.raises(ModelLoadError, match="the disk is gone"):
        loaded(folder, [HostLane(), BrokenLane()])
    assert not [t for t in threading.enumerate() if t.name.startswith("tessera-load")]


def test_a_wrong_shape_is_found_before_anything_is_written(folder) -> None:
    model = empty_model(folder)
    for parameter in model.parameters():
        parameter.fill_(7.0)
    last = sorted(folder.glob("*.safetensors"))[-1]
    checkpoint = SafetensorsCheckpoint(folder)
    names = list(checkpoint._stored_names[last.name])
    save_file({name: torch.zeros(3, 5) for name in names}, last)
    with pytest.raises(ModelLoadError, match=r"has shape \(3, 5\), the config says"):
        load_checkpoint(
            model, unquantised(model), checkpoint, [HostLane()], lambda done, total: None
        )
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def test_opened_tensors_are_read_lazily_and_by_name(folder) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    with checkpoint.opened({name}) as tensors:
        assert list(tensors) == [name]
        part = tensors[name][(slice(0, 2), slice(3, 5))]
    assert np.array_equal(part.numpy(), checkpoint.read(name)[:2, 3:5].numpy())


def test_slots_cover_every_parameter(folder) -> None:
    assert set(weight_slots(empty_model(folder))) == SafetensorsCheckpoint(folder).names
