"""Files that others write to, judged without mapping them: as adapter_at judges them."""

import pytest

from service.adapters.unmapped import unmapped_adapter
from tests.fakes.small_adapters import TAKEN, save
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
