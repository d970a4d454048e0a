"""Files that others write to, judged without mapping them: as adapter_at judges them."""

import json

import msgspec
import pytest
from safetensors import safe_open

from service.adapters.unmapped import HeadersInMemory, max_header_bytes, unmapped_adapter
from tests.fakes.small_adapters import TAKEN, Q, save
from workers.adapters.expert_modules import ExpertModules
from workers.adapters.folder import adapter_at
from workers.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"


def test_a_whole_adapter_is_the_one_that_a_call_would_load(tmp_path) -> None:
    save(tmp_path / "a")
    assert unmapped_adapter("a", tmp_path / "a", TAKEN) == adapter_at("a", tmp_path / "a", TAKEN)


def test_no_beginning_of_a_file_is_taken_for_one(tmp_path) -> None:
    save(tmp_path / "a")
    whole = (tmp_path / "a" / WEIGHTS).read_bytes()
    for num_bytes in (*range(0, len(whole), 7), len(whole) - 1):
        (tmp_path / "a" / WEIGHTS).write_bytes(whole[:num_bytes])
        with pytest.raises(AdapterError, match="cannot be read"):
            unmapped_adapter("a", tmp_path / "a", TAKEN)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": "x"}}', b"\xff", b"[" * 50_000],
)
def test_headers_that_are_none_are_refused(tmp_path, header) -> None:
    save(tmp_path / "a")
    data = len(header).to_bytes(8, "little") + header
    (tmp_path / "a" / WEIGHTS).write_bytes(data)
    with pytest.raises(AdapterError, match="cannot be read"):
        unmapped_adapter("a", tmp_path / "a", TAKEN)


A, B = (f"base_model.model.{Q}.lora_{part}.weight" for part in "AB")


def write(folder, *tensors, num_bytes=None, metadata=None):
    """tensors: name, type, shape, offsets. num_bytes: behind the header, as many as stated."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, dtype, shape, offsets in tensors
    }
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (tensors[-1][3][1] if num_bytes is None else num_bytes))


GOOD_A, GOOD_B = (A, "F32", [2, 6], [0, 48]), (B, "F32", [10, 2], [48, 128])


def test_offsets_are_judged_as_safetensors_judges_them(tmp_path) -> None:
    save(tmp_path / "a")
    write(tmp_path / "a", GOOD_A, GOOD_B, metadata={"format": "pt"})
    assert unmapped_adapter("a", tmp_path / "a", TAKEN) == adapter_at("a", tmp_path / "a", TAKEN)
    for broken in (
        [(A, "F32", [2, 6], [0, 48]), (B, "F32", [10, 2], [0, 80])],
        [(A, "F32", [2, 6], [0, 48]), (B, "F32", [10, 2], [40, 120])],
        [(A, "F32", [2, 6], [8, 56]), (B, "F32", [10, 2], [56, 136])],
        [(A, "F32", [2, 6], [0, 48]), (B, "F32", [10, 2], [50, 130])],
        [(A, "F32", [2, 6], [0, 48]), (B, "F32", [10, 2], [48, 4 << 30])],
        [(A, "F16", [2, 6], [0, 48]), (B, "F32", [10, 2], [48, 128])],
        [(A, "F31", [2, 6], [0, 48]), (B, "F32", [10, 2], [48, 128])],
        [(A, "F32", [-2, -6], [0, 48]), (B, "F32", [10, 2], [48, 128])],
        [(A, "F32", [2, 6], [48, 0]), (B, "F32", [10, 2], [0, 80])],
    ):
        write(tmp_path / "a", *broken)
        for read in (unmapped_adapter, adapter_at):
            with pytest.raises(AdapterError, match="cannot be read"):
                read("a", tmp_path / "a", TAKEN)
    write(tmp_path / "a", GOOD_A, GOOD_B, metadata={"format": 1})
    for read in (unmapped_adapter, adapter_at):
        with pytest.raises(AdapterError, match="cannot be read"):
            read("a", tmp_path / "a", TAKEN)


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F8_E4M3", "F4"])
def test_sizes_of_types_are_those_of_safetensors(tmp_path, dtype) -> None:
    num_bytes = {"I64": 32, "BOOL": 4, "F8_E4M3": 4, "F4": 2}[dtype]
    write(tmp_path, ("x", dtype, [2, 2], [0, num_bytes]))
    with safe_open(tmp_path / WEIGHTS, "np") as file:
        assert list(file.keys()) == ["x"]
    with (tmp_path / WEIGHTS).open("rb") as file:
        assert HeadersInMemory.read(file).keys() == ["x"]


def test_a_header_longer_than_a_model_needs_is_not_decoded(tmp_path) -> None:
    save(tmp_path / "a")
    write(tmp_path / "a", GOOD_A, GOOD_B, metadata={"x": "y" * max_header_bytes(TAKEN)})
    with pytest.raises(AdapterError, match="more than the"):
        unmapped_adapter("a", tmp_path / "a", TAKEN)
    experts = ExpertModules("e", "e", "g", "u", "d", 128, 8, 6, in_turns=False, inputs_first=False)
    large = msgspec.structs.replace(TAKEN, experts=(experts,) * 48)
    assert max_header_bytes(large) > 128 * 48 * 3 * 2 * 200
    with pytest.raises(AdapterError, match="too long"):
        unmapped_adapter("a", tmp_path / "a", large)
    huge = msgspec.structs.replace(TAKEN, experts=(experts,) * 2000)
    assert max_header_bytes(huge) == 100_000_000


def test_reasons_are_those_of_a_call(tmp_path) -> None:
    save(tmp_path / "large", rank=8)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("large", "bare", "nowhere"):
        told = []
        for read in (unmapped_adapter, adapter_at):
            with pytest.raises(AdapterError) as caught:
                read(name, tmp_path / name, TAKEN)
            told.append(str(caught.value))
        assert told[0] == told[1]


def test_trouble_of_a_file_system_can_be_told_from_contents(tmp_path, monkeypatch) -> None:
    save(tmp_path / "a")

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.open", fail)
    with pytest.raises(AdapterError, match="Input/output error") as caught:
        unmapped_adapter("a", tmp_path / "a", TAKEN)
    assert isinstance(caught.value.__cause__, OSError)
