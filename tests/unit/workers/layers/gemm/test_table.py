"""Choices in files: what is shipped for which GPU, and what several processes keep."""

import json
import multiprocessing
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.gemm.configs import TOKEN_BUCKETS, GemmConfig, LtConfig
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.gemm.table import (
    SHIPPED_FOLDER,
    Tables,
    cached_path,
    dump_choices,
    keep_choices,
    kept_choices,
    merged,
    read_choices,
    shipped_tables,
)

SKINNY = GemmConfig("skinny", 64, 128, 2, 4, 4)
LT = LtConfig(130100, 2, "0a" * 64)
H200 = {"a": {1: SKINNY, 16: LT, 32: None}}
H100 = {"a": {1: LT}}
A100 = {"a": {1: None}}


@pytest.fixture
def folder(tmp_path):
    """Of three GPUs."""
    files = {"sm90/NVIDIA_H200": H200, "sm90/NVIDIA_H100_80GB_HBM3": H100, "sm80/NVIDIA_A100": A100}
    for name, choices in files.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(dump_choices(choices))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "capability", "tables"),
    [
        ("NVIDIA H200", (9, 0), Tables(H200, {})),
        ("NVIDIA H100 PCIe", (9, 0), Tables({}, H100)),
        ("NVIDIA H20", (9, 0), Tables({}, H200)),
        ("NVIDIA A100-SXM4-80GB", (8, 0), Tables({}, A100)),
        ("NVIDIA A10G", (8, 6), Tables({}, A100)),
        ("NVIDIA B200", (10, 0), Tables({}, {"a": {}})),
    ],
)
def test_own_choices_or_those_of_the_nearest_gpu(folder, name, capability, tables) -> None:
    assert shipped_tables(folder, name, capability) == tables


def test_algorithms_are_of_one_generation(folder) -> None:
    (folder / "sm90" / "NVIDIA_H100_80GB_HBM3.json").unlink()
    assert shipped_tables(folder, "NVIDIA B200", (10, 0)).guessed == {"a": {1: SKINNY, 32: None}}
    assert shipped_tables(folder, "NVIDIA H20", (9, 0)).guessed == H200


def test_no_file_means_no_guess(tmp_path) -> None:
    assert shipped_tables(tmp_path, "NVIDIA H200", (9, 0)) == Tables({}, {})


def test_choices_survive_the_file(tmp_path) -> None:
    choices = {"a": {1: SKINNY, 16: LT, 8192: None}, "b": {}}
    (tmp_path / "x.json").write_text(dump_choices(choices))
    assert read_choices(tmp_path / "x.json") == choices


def test_of_two_files_the_second_goes_first_bucket_by_bucket() -> None:
    first, second = {"a": {1: SKINNY, 16: LT}}, {"a": {16: None}, "b": {1: LT}}
    assert merged(first, second) == {"a": {1: SKINNY, 16: None}, "b": {1: LT}}


def keep_many(path, process) -> None:
    for n in range(20):
        keep_choices(path, {f"{process}-{n}": {1: SKINNY}})


def test_processes_that_keep_at_the_same_time_lose_nothing(tmp_path) -> None:
    path = cached_path(tmp_path / "cache", "NVIDIA L4", "2.11")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=keep_many, args=(path, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    assert len(read_choices(path)) == 80
    assert sorted(one.suffix for one in path.parent.iterdir()) == [".json", ".lock"]


def test_a_folder_that_cannot_be_written_to_is_said_and_does_no_harm(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    keep_choices(tmp_path / "file" / "gemm.json", {"a": {1: SKINNY}})
    assert "not kept for the next start" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 5}', '{"a": {"1": ["skinny", 64]}}', '{"a": {"1": []}}', "\xff"]
)
def test_a_file_of_no_use_is_measured_anew_and_replaced(tmp_path, caplog, text) -> None:
    """Such as another version left in a folder that outlives the pod."""
    path = tmp_path / "gemm.json"
    path.write_text(text, encoding="latin-1")
    assert kept_choices(path) == {}
    assert "of no use" in caplog.text
    keep_choices(path, {"a": {1: SKINNY}})
    assert read_choices(path) == {"a": {1: SKINNY}}


SHIPPED = sorted(SHIPPED_FOLDER.glob("sm*/*.json"))
ROOT = Path(__file__).parents[5]


def test_an_installed_package_has_the_shipped_tables() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["workers"]
    packed = {path for pattern in patterns for path in (ROOT / "workers").glob(pattern)}
    assert SHIPPED
    assert packed.issuperset(SHIPPED)


def test_choices_are_shipped() -> None:
    assert SHIPPED
    assert list(SHIPPED_FOLDER.rglob("*.json")) == list(SHIPPED_FOLDER.glob("sm*/*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_choices_are_whole(path) -> None:
    choices = read_choices(path)
    assert choices
    assert dump_choices(choices) == path.read_text(encoding="utf-8")
    assert SHIPPED_FOLDER in path.parents
    for key, by_tokens in choices.items():
        size, role = key.split()
        _, in_features = map(int, size.split("x"))
        assert sorted(by_tokens) == list(TOKEN_BUCKETS)
        for num_tokens, config in by_tokens.items():
            assert config is None or in_features % config.num_splits == 0
            if isinstance(config, GemmConfig):
                assert config.fits(num_tokens, in_features, HOPPER), (key, num_tokens)
            assert role != "whole" or config is None or config.num_splits == 1
        assert json.loads(path.read_text(encoding="utf-8"))[key].keys() == {
            str(n) for n in TOKEN_BUCKETS
        }
