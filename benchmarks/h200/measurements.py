"""The log of measurements and the tables made from it. Knows no engine and starts no process.

A log is JSON lines: model, workload, engine, repeat, and a repeat's measurements so far. The last
line of a repeat counts, so that a run that was cut short keeps what it had.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.h200.workloads import PREFIX_CACHED

Row = dict[str, float | str]
Samples = dict[str, dict[str, list[float]]]
"""engine -> measurement -> its value in each repeat."""

_PREFIX = "256 requests, 4096 shared + 128 own in, 64 out"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of a table. name: as in workloads.py."""

    name: str
    title: str
    is_rate: bool = False


MEASUREMENTS = (
    Measurement("decode_1_ms", "decode, 1 stream, 1k context: ms a token"),
    Measurement("decode_2_ms", "decode, 2 streams"),
    Measurement("decode_64_ms", "decode, 64 streams, 1k context"),
    Measurement("decode_256_ms", "decode, 256 streams, 256 context"),
    Measurement("prefill_64x1024_tps", "prefill 64 x 1024: prompt tokens/s", is_rate=True),
    Measurement("512x1024_256_s", "512 requests, 1024 in, 256 out: s"),
    Measurement("256x1024_256_s", "256 requests, 1024 in, 256 out: s"),
    Measurement(
        "output_256x1024_1024_tps",
        "256 requests, 1024 in, 1024 out: output tokens/s",
        is_rate=True,
    ),
    Measurement("output_4x16_8_tps", "4 requests, 16 in, 8 out: output tokens/s", is_rate=True),
    Measurement("8x64_8_s", "8 requests, 64 in, 8 out: s"),
    Measurement("16x7000_64_s", "16 requests, 7000 in, 64 out: s"),
    Measurement("prefix_256x4096_cold_s", f"{_PREFIX}, prefix unseen: s"),
    Measurement("prefix_256x4096_warm_s", f"{_PREFIX}, prefix cached: s"),
    Measurement("prefix_8x64_cold_s", "8 requests with a prefix, unseen: s"),
    Measurement("prefix_8x64_warm_s", "8 requests with a prefix, cached: s"),
    *(
        Measurement(f"first_token_{length}_ms", f"first token of one prompt of {length}: ms")
        for length in (16, 32, 128, 256, 512, 1024)
    ),
    Measurement("chat_8_s", "8 requests of mixed lengths: s"),
    Measurement("chat_1024_s", "1024 requests, 32 to 512 in, 32 to 384 out: s"),
    Measurement("startup_s", "start to ready: s"),
)


def is_prefix_workload(workload: str) -> bool:
    return workload in PREFIX_CACHED


class Log:
    """Rows of any number of models, workloads and engines; what is added goes to a file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[str, str, str, int], Row] = {}

    def read(self, path: Path) -> None:
        """Take over a log's rows. A file that is not there holds none; a cut last line is passed.

        Raises ValueError for any other line that is none of a log's.
        """
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                self._keep(json.loads(line))
            except (json.JSONDecodeError, KeyError) as error:
                if number < len(lines):
                    raise ValueError(f"{path}:{number} is no line of a log: {line!r}") from error

    def add(self, model: str, workload: str, row: Row) -> None:
        whole = {"model": model, "workload": workload, **row}
        self._keep(whole)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")

    def workloads(self, model: str) -> list[str]:
        return list(dict.fromkeys(key[1] for key in self._rows if key[0] == model))

    def samples(self, model: str, workload: str) -> Samples:
        found: Samples = {}
        for (of_model, of_workload, engine, _), row in self._rows.items():
            if (of_model, of_workload) != (model, workload):
                continue
            values = found.setdefault(engine, {})
            for measurement in MEASUREMENTS:
                if measurement.name in row:
                    values.setdefault(measurement.name, []).append(float(row[measurement.name]))
        return found

    def _keep(self, row: Row) -> None:
        key = str(row["model"]), str(row["workload"]), str(row["engine"]), int(row["repeat"])
        self._rows[key] = row


def lead_table(samples: Samples) -> str:
    """Markdown: the best of each engine's repeats, and Tessera's lead over each peer's best."""
    engines = _engines(samples)
    peers = engines[1:]
    rows = []
    for measurement in _measured(samples):
        best = {name: _best(measurement, samples[name]) for name in engines if name in samples}
        cells = [_text(best.get(name)) for name in engines]
        cells += [_lead(measurement, best.get("tessera"), best[name]) for name in peers]
        rows.append([measurement.title, *cells])
    return _markdown(["workload", *engines, *(f"ahead of {name}" for name in peers)], rows)


def spread_table(samples: Samples) -> str:
    """Markdown: the median of each engine's repeats and, in percent of it, their whole range."""
    engines = _engines(samples)
    rows = [
        [measurement.title, *(_median(samples.get(name, {}), measurement) for name in engines)]
        for measurement in _measured(samples)
    ]
    return _markdown(["workload", *engines], rows)


def _engines(samples: Samples) -> list[str]:
    return ["tessera", *(name for name in samples if name != "tessera")]


def _measured(samples: Samples) -> list[Measurement]:
    names = {name for values in samples.values() for name in values}
    return [measurement for measurement in MEASUREMENTS if measurement.name in names]


def _best(measurement: Measurement, values: Mapping[str, list[float]]) -> float | None:
    if measurement.name not in values:
        return None
    choose = max if measurement.is_rate else min
    return choose(values[measurement.name])


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.6g}"


def _lead(measurement: Measurement, ours: float | None, theirs: float | None) -> str:
    if not ours or not theirs:
        return ""
    return f"{ours / theirs if measurement.is_rate else theirs / ours:.3f}"


def _median(values: Mapping[str, list[float]], measurement: Measurement) -> str:
    repeats = values.get(measurement.name)
    if not repeats:
        return ""
    median = statistics.median(repeats)
    spread = max(repeats) - min(repeats)
    share = f"{spread / median:.1%}" if median else f"{spread:g}"
    return f"{_text(median)} ({share} of {len(repeats)})"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
