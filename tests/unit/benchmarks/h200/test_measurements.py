"""The log and the tables: which value counts, and what is ahead of what."""

from pathlib import Path

import pytest

from benchmarks.h200.measurements import Log, lead_table, spread_table


def cells(table: str, title: str) -> list[str]:
    line = next(line for line in table.splitlines() if title in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def filled(path: Path) -> Log:
    log = Log(path)
    for engine, decode, prefill in (("vllm", 5.0, 43_000.0), ("tessera", 4.0, 45_150.0)):
        for repeat, slower in enumerate((1.0, 1.1)):
            row = {"engine": engine, "repeat": repeat, "startup_s": 9.0}
            log.add("m", "full", row)
            log.add("m", "full", {**row, "decode_1_ms": decode * slower})
            log.add(
                "m",
                "full",
                {**row, "decode_1_ms": decode * slower, "prefill_64x1024_tps": prefill / slower},
            )
    return log


def test_the_best_repeat_counts_and_a_ratio_above_one_says_tessera_is_ahead(tmp_path: Path) -> None:
    table = lead_table(filled(tmp_path / "log").samples("m", "full"))
    assert table.splitlines()[0] == "| workload | tessera | vllm | ahead of vllm |"
    assert cells(table, "decode, 1 stream")[1:] == ["4", "5", "1.250"]
    assert cells(table, "prefill")[1:] == ["45,150", "43,000", "1.050"]


def test_median_and_range_are_given_for_every_engine(tmp_path: Path) -> None:
    table = spread_table(filled(tmp_path / "log").samples("m", "full"))
    assert cells(table, "decode, 1 stream")[1:] == ["4.2 (9.5% of 2)", "5.25 (9.5% of 2)"]


def test_a_later_call_goes_on_where_a_cut_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filled(path)
    with path.open("a") as file:
        file.write('{"model": "m", "workl')
    again = Log(tmp_path / "other")
    again.read(path)
    again.add("m", "full", {"engine": "sglang", "repeat": 0, "decode_1_ms": 4.8})
    samples = again.samples("m", "full")
    assert samples["sglang"] == {"decode_1_ms": [4.8]}
    assert samples["tessera"]["decode_1_ms"] == [4.0, 4.4]
    assert "1.200" in cells(lead_table(samples), "decode, 1 stream")


def test_a_broken_line_inside_a_log_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("{}\n{}\n")
    with pytest.raises(ValueError, match="log:1 "):
        Log(tmp_path / "other").read(path)


def test_models_and_workloads_do_not_mix(tmp_path: Path) -> None:
    log = filled(tmp_path / "log")
    log.add("m", "prefix", {"engine": "vllm", "repeat": 0, "prefix_256x4096_cold_s": 3.0})
    log.add("n", "full", {"engine": "vllm", "repeat": 0, "decode_1_ms": 1.0})
    assert log.workloads("m") == ["full", "prefix"]
    assert log.samples("m", "prefix") == {"vllm": {"prefix_256x4096_cold_s": [3.0]}}
    assert log.samples("m", "full")["vllm"]["decode_1_ms"] == [5.0, 5.5]


def test_times_too_short_to_be_measured_break_no_table(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    for engine, seconds in (("tessera", 0.0), ("vllm", 1.0)):
        log.add("m", "full", {"engine": engine, "repeat": 0, "startup_s": seconds})
    samples = log.samples("m", "full")
    assert cells(lead_table(samples), "start")[1:] == ["0", "1", ""]
    assert cells(spread_table(samples), "start")[1:] == ["0 (0 of 1)", "1 (0.0% of 1)"]
