"""Tessera beside its peers on one GPU: every engine in a process of its own, one after the other.

    python3 benchmarks/h200/compare.py benchmarks/h200/models/llama-3.1-8b.json \\
        --peers DRIVERS --site vllm=SITE --site sglang=SITE

DRIVERS is a folder with run_NAME.py for each peer: it takes a model folder and prints JSON lines
with the measurements of PEER_NAMES. SITE is what the peer's PYTHONPATH becomes, DRIVERS added. Of
several repeats the best counts, for everybody. Prints a Markdown table; a ratio above 1 says that
Tessera is ahead. Exit status 1 if an engine failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. name: in Tessera's output; peer_name: in the peers'."""

    title: str
    name: str
    peer_name: str
    is_rate: bool = False


ROWS = (
    Row("decode, 1 stream, 1k context: ms a token", "decode_1_ms", "decode_1_ms_per_token"),
    Row("decode, 64 streams, 1k context", "decode_64_ms", "decode_64_ms_per_token"),
    Row("decode, 256 streams, 256 context", "decode_256_ms", "decode_256_ms_per_token"),
    Row(
        "prefill 64 x 1024: prompt tokens/s",
        "prefill_64x1024_tps",
        "prefill_64x1024_tokens_per_s",
        is_rate=True,
    ),
    Row("512 requests, 1024 in, 256 out: s", "512x1024_256_s", "throughput_512x1024_256_s"),
    Row("16 requests, 7000 in, 64 out: s", "16x7000_64_s", "long_16x7000_64_s"),
    Row("start to ready: s", "startup_s", "startup_s"),
)
Measurements = Mapping[str, float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--peers", type=Path, help="folder with the peers' drivers")
    parser.add_argument("--site", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write all measurements here")
    return parser.parse_args()


def measurements_of(output: str, is_peer: bool) -> dict[str, float]:
    """The best of all repeats, under Tessera's names. Lines that are no JSON object are passed."""
    best: dict[str, float] = {}
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        values = json.loads(line)
        for row in ROWS:
            value = values.get(row.peer_name if is_peer else row.name)
            if value is not None:
                choose = max if row.is_rate else min
                best[row.name] = choose(best.get(row.name, value), value)
    return best


def run(command: list[str], python_path: str) -> str:
    """Standard output. Raises CalledProcessError or TimeoutExpired; errors go to our own stderr."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout


def run_tessera(config: Path, repeats: int) -> dict[str, float]:
    module = "benchmarks.h200.run_tessera"
    command = [sys.executable, "-m", module, str(config.resolve()), "--repeats", str(repeats)]
    inherited = os.environ.get("PYTHONPATH", "")
    return measurements_of(run(command, f"{ROOT}:{inherited}"), is_peer=False)


def run_peer(name: str, site: str, drivers: Path, config: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        command = [sys.executable, str(drivers.resolve() / f"run_{name}.py"), folder]
        return measurements_of(run(command, f"{site}:{drivers.resolve()}"), is_peer=True)


def table(results: Mapping[str, Measurements]) -> str:
    """Markdown: a column an engine, and Tessera's lead over the best of the others."""
    peers = [name for name in results if name != "tessera"]
    columns = ["tessera", *peers, "ahead of the best by"]
    lines = ["| workload | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in ROWS:
        values = {name: results[name].get(row.name) for name in ("tessera", *peers)}
        cells = ["" if value is None else f"{value:,g}" for value in values.values()]
        lines.append(f"| {row.title} | " + " | ".join([*cells, _lead(row, values)]) + " |")
    return "\n".join(lines)


def _lead(row: Row, values: Mapping[str, float | None]) -> str:
    ours = values["tessera"]
    theirs = [value for name, value in values.items() if name != "tessera" and value is not None]
    if ours is None or not theirs:
        return ""
    ratio = ours / max(theirs) if row.is_rate else min(theirs) / ours
    return f"{ratio:.2f}"


def main() -> int:
    arguments = parse_arguments()
    results: dict[str, dict[str, float]] = {}
    failed = []
    jobs = [("tessera", ""), *(entry.split("=", 1) for entry in arguments.site)]
    for name, site in jobs:
        try:
            results[name] = (
                run_tessera(arguments.config, arguments.repeats)
                if name == "tessera"
                else run_peer(name, site, arguments.peers, arguments.config)
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            results[name] = {}
            print(f"{name} failed: {error}", file=sys.stderr)
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
