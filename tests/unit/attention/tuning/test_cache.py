"""What is kept between starts: whole, shared by processes, apart for other versions."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from attention.tuning.cache import (
    code_version,
    keep_times,
    kept_times,
    package_versions,
    table_from_json,
    table_path,
    table_to_json,
    with_times,
)
from attention.tuning.table import LeftOut, TuningTable
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode, extend

FACTS = {"device": "NVIDIA H200 (sm90)", "packages": "torch 2.11.0"}
NAMES = {DECODE: ("a", "b"), EXTEND: ("a",)}
TIMES = {
    decode(16, 1000, is_uneven=True): {"a": 1e-5, "b": 2e-5},
    extend(8, 256, 4096): {"a": 3e-4},
}


def test_what_was_kept_comes_back(tmp_path):
    path = table_path(tmp_path / "deeper", "NVIDIA H200", FACTS)
    keep_times(path, FACTS, TuningTable(NAMES, TIMES))
    assert kept_times(path) == TIMES
    assert path.name.startswith("attention-NVIDIA_H200-")
    assert "torch 2.11.0" in path.read_text()


def test_other_facts_have_another_file(tmp_path):
    other = table_path(tmp_path, "NVIDIA H200", FACTS | {"packages": "torch 2.12.0"})
    assert other != table_path(tmp_path, "NVIDIA H200", FACTS)
    in_other_order = dict(reversed(FACTS.items()))
    assert table_path(tmp_path, "d", in_other_order) == table_path(tmp_path, "d", FACTS)


def test_processes_at_the_same_time_lose_nothing(tmp_path):
    path = table_path(tmp_path, "gpu", FACTS)
    tables = [TuningTable(NAMES, {decode(n, 100): {"a": n * 1e-6}}) for n in range(1, 21)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda table: keep_times(path, FACTS, table), tables))
    assert {point.rows for point in kept_times(path)} == set(range(1, 21))


def test_a_broken_file_is_measured_anew_and_replaced(tmp_path, caplog):
    path = table_path(tmp_path, "gpu", FACTS)
    for text in ("{", '{"points": [{"phase": "other"}]}', "[]"):
        path.write_text(text)
        assert kept_times(path) == {}
    assert caplog.text.count("is of no use") == 3


@pytest.mark.parametrize("seconds", ['{"a": 0.0}', '{"a": NaN}', '{"a": -1e-6}', "[]", "null"])
def test_times_that_are_none_are_measured_anew(tmp_path, caplog, seconds):
    """They would end every start: of times logarithms are compared."""
    path = table_path(tmp_path, "gpu", FACTS)
    keep_times(path, FACTS, TuningTable(NAMES, {decode(4, 100): {"a": 2e-6}}))
    path.write_text(path.read_text().replace('{\n    "a": 2e-06\n   }', seconds))
    assert seconds in path.read_text()
    assert kept_times(path) == {}
    assert "is of no use" in caplog.text
    keep_times(path, FACTS, TuningTable(NAMES, TIMES))
    assert kept_times(path) == TIMES


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    keep_times(tmp_path / "file" / "a.json", FACTS, TuningTable(NAMES, TIMES))
    assert "not kept for the next start" in caplog.text


def test_a_table_travels_as_text():
    table = TuningTable(NAMES, TIMES, (LeftOut(DECODE, "b", "failed"),))
    assert table_from_json(table_to_json(table)) == table


def test_what_was_measured_now_goes_before_what_was_kept():
    table = TuningTable(NAMES, {extend(8, 256, 4096): {"a": 1.0}})
    assert with_times(table, TIMES).seconds == TIMES | table.seconds


def test_the_code_that_attends_has_a_version(tmp_path):
    (tmp_path / "kernel.py").write_text("a = 1\n")
    before = code_version(tmp_path)
    assert code_version(tmp_path) == before
    (tmp_path / "kernel.py").write_text("a = 2\n")
    assert code_version(tmp_path) != before


def test_packages_that_are_installed_have_their_versions():
    assert package_versions(("torch", "no-such-package-of-kernels")).startswith("torch ")
