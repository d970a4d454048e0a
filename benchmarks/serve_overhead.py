"""What HTTP, router, channel and Ray add to an engine: every way to it, the same requests.

    python -m benchmarks.serve_overhead --config benchmarks/h200/models/llama-3.1-8b.json
    python -m benchmarks.serve_overhead --fake-step-ms 10

Ways: the engine alone in a process; `tessera serve` over HTTP and gRPC with http.proxy=direct, and
over HTTP with http.proxy=haproxy. Levels: 32 streams whose outputs differ in length, so that
requests arrive one by one, for the time to the first token; 256 streams for tokens per second. A
server is started once a way and runs all levels, as the engine alone does; with --log a later call
adds ways to the table. --config gives shapes
with random weights; --model a folder or "builtin"; --fake-step-ms an engine that costs nothing and
gives every stream a token a step: what is left is the service. Clients are processes of their own,
--clients of them; their own cost is in the table. Bars: at 32 streams a median TTFT within 5 ms of
the engine alone, at 256 streams at least 0.95 of its tokens/s.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.end_to_end import free_ports, stop, wait_until_ready
from benchmarks.model_folder import make_model_folder
from benchmarks.overhead_cpu import (
    cpu_seconds_by_kind,
    descendants,
    read_processes,
    used_since,
)
from benchmarks.overhead_levels import Level, RunRecord, Share, merge_records
from benchmarks.overhead_process import READY, Plan
from service.bench.statistics import BenchResult, Distribution, summarize

ALONE = "in process"
# What `tessera serve` prints once Serve runs all replicas and ingresses.
ANNOUNCEMENT = "Tessera serves"
START_TIMEOUT_S = 180.0
WAYS = (ALONE, "direct", "haproxy", "grpc")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a level. cpu_us: per output token, by kind of process."""

    way: str
    level: str
    result: BenchResult
    cpu_us: dict[str, float]


@dataclass(slots=True)
class Children:
    """Processes of overhead_process.py that run one plan in shares."""

    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, plan: Plan, count: int) -> None:
        for index in range(count):
            child = subprocess.Popen(
                (sys.executable, "-m", "benchmarks.overhead_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
            )
            self.processes.append(child)
            mine = msgspec.structs.replace(plan, share=Share(index, count))
            _write_line(child, msgspec.json.encode(mine).decode())
        for child in self.processes:
            while _read_line(child) != READY:
                pass  # an engine may print before

    def run(self, level: Level, seed: int) -> list[RunRecord]:
        for child in self.processes:
            _write_line(child, f"{seed} {level.name}")
        return [msgspec.json.decode(_read_line(child), type=RunRecord) for child in self.processes]

    def close(self) -> None:
        for child in self.processes:
            if child.stdin is not None:
                child.stdin.close()
        for child in self.processes:
            child.wait(60)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.config is not None:
            arguments.model = str(make_model_folder(arguments.config, Path(scratch)))
            arguments.engine.append("load_format=dummy")
        measurements = read_log(arguments.log)
        for way in arguments.ways:
            if way != "grpc":  # measured on the server of "direct"
                for row in measure_way(way, arguments):
                    measurements.append(row)
                    write_log(arguments.log, row)
    print_table(measurements, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="shapes, a Hugging Face config.json")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--fake-step-ms", type=float, help="no model, this pace")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="grpc comes with direct"
    )
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--requests-per-stream", type=int, default=3)
    parser.add_argument("--input-len", default="256")
    parser.add_argument("--output-len", default="256")
    parser.add_argument("--vocab-size", type=int, default=4096, help="prompt ids lie below")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--settle-s", type=float, default=0.0, help="rest before the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="JSON lines, read first and appended to")
    parser.add_argument("--server-log", type=Path, help="what the servers print, appended to")
    return parser.parse_args()


def read_log(log: Path | None) -> list[Measurement]:
    if log is None or not log.exists():
        return []
    return [msgspec.json.decode(line, type=Measurement) for line in log.read_bytes().splitlines()]


def write_log(log: Path | None, row: Measurement) -> None:
    if log is not None:
        with log.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def levels_of(arguments: argparse.Namespace) -> list[Level]:
    """Warm-up first. Fewer streams than the most get outputs of 0.5 to 1.5 times the length."""
    most = max(arguments.streams)
    length = int(arguments.output_len)
    spread = f"uniform:{max(1, length // 2)}:{length + length // 2}"
    warm_up = Level("warm-up", most, most, arguments.input_len, "32", is_warm_up=True)
    return [warm_up] + [
        Level(
            f"{streams} streams",
            streams,
            streams * arguments.requests_per_stream * (1 if streams == most else 2),
            arguments.input_len,
            str(length) if streams == most else spread,
        )
        for streams in arguments.streams
    ]


def measure_way(way: str, arguments: argparse.Namespace) -> Iterator[Measurement]:
    """All levels over one way; over gRPC too where the server is that of "direct"."""
    if way == ALONE:
        yield from run_levels(ALONE, plan_of("engine", "", arguments), 1, None, arguments)
        return
    with running_server(way, arguments) as (server, http_url, grpc_address):
        plan = plan_of("http", http_url, arguments)
        yield from run_levels(way, plan, arguments.clients, server, arguments)
        if way == "direct" and "grpc" in arguments.ways:
            plan = plan_of("grpc", grpc_address, arguments)
            yield from run_levels("grpc", plan, arguments.clients, server, arguments)


def plan_of(way: Any, address: str, arguments: argparse.Namespace) -> Plan:
    return Plan(
        way=way,
        levels=levels_of(arguments),
        vocab_size=arguments.vocab_size,
        address=address,
        model=arguments.model,
        engine_options=arguments.engine,
        fake_step_s=None if arguments.fake_step_ms is None else arguments.fake_step_ms / 1e3,
    )


def run_levels(
    way: str,
    plan: Plan,
    num_processes: int,
    server: "subprocess.Popen[bytes] | None",
    arguments: argparse.Namespace,
) -> Iterator[Measurement]:
    children = Children()
    try:
        children.start(plan, num_processes)
        time.sleep(arguments.settle_s)
        for level in plan.levels:
            for repeat in range(1 if level.is_warm_up else arguments.repeats):
                # A seed of its own: a repeat must not find its prompts in the prefix cache.
                row = run_once(way, level, arguments.seed + repeat, children, server)
                if not level.is_warm_up:
                    yield row
            if level.is_warm_up:
                time.sleep(arguments.settle_s)
    finally:
        children.close()


def run_once(
    way: str,
    level: Level,
    seed: int,
    children: Children,
    server: "subprocess.Popen[bytes] | None",
) -> Measurement:
    before = _server_cpu(server)
    records = children.run(level, seed)
    spent = used_since(before, _server_cpu(server))
    result = summarize(merge_records(records), is_open_loop=False)
    if result.errors:
        sys.exit(f"{way}, {level.name}: {result.errors}: {result.example_error}")
    spent["client" if server else "engine"] = sum(record.cpu_s for record in records)
    per_token = {kind: s / result.num_output_tokens * 1e6 for kind, s in spent.items()}
    line = f"{way}, {level.name}: {result.output_tokens_per_s:,.0f} tokens/s"
    print(line, file=sys.stderr, flush=True)
    return Measurement(way, level.name, result, per_token)


def _server_cpu(server: "subprocess.Popen[bytes] | None") -> dict[str, float]:
    if server is None:
        return {}
    return cpu_seconds_by_kind(descendants(read_processes(), server.pid))


@contextmanager
def running_server(
    proxy: str, arguments: argparse.Namespace
) -> Iterator[tuple["subprocess.Popen[bytes]", str, str]]:
    """A server with this http.proxy, its HTTP URL and gRPC address; drained at the end."""
    http, grpc, metrics = free_ports(3)
    settings = [f"engine.{option}" for option in arguments.engine] + arguments.set
    settings += [f"http.port={http}", f"grpc.port={grpc}", f"metrics.port={metrics}"]
    settings += [f"http.proxy={proxy}"]
    if arguments.fake_step_ms is not None:
        program = ["-m", "benchmarks.fake_service", str(arguments.fake_step_ms), *settings]
    else:
        flags = [part for setting in settings for part in ("--set", setting)]
        program = ["-c", "from service.cli import main; main()", "serve", arguments.model, *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen((sys.executable, *program), stdout=log, stderr=log, cwd=_ROOT)
        try:
            wait_until_announced(server, Path(log.name))
            wait_until_ready(server, f"http://127.0.0.1:{http}/health/ready")
            yield server, f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        finally:
            stop(server)
            if arguments.server_log is not None:
                with arguments.server_log.open("a") as kept:
                    kept.write(Path(log.name).read_text(errors="replace"))


def wait_until_announced(server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until every ingress listens: connections made before would all be with the first one."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while ANNOUNCEMENT not in log.read_text(errors="replace"):
        if server.poll() is not None or time.monotonic() > end_s:
            sys.exit("the server did not come up:\n" + log.read_text(errors="replace")[-2000:])
        time.sleep(0.1)


def print_table(rows: list[Measurement], arguments: argparse.Namespace) -> None:
    """Medians over the repeats; differences from the engine alone, where it was measured."""
    columns = ("level", "way", "tokens/s", "ratio", "TTFT p50 ms", "more", "p99", "gap ms", "lag")
    table = Table(*columns, "CPU us a token")
    for level in dict.fromkeys(row.level for row in rows):
        alone = [row for row in rows if row.level == level and row.way == ALONE]
        for way in dict.fromkeys(row.way for row in rows):
            mine = [row for row in rows if row.level == level and row.way == way]
            table.add_row(level, way, *cells_of(mine, alone))
    console = Console(width=160)
    console.print(table)
    console.print(f"{os.cpu_count()} CPUs, {arguments.clients} clients, medians of repeats")


def cells_of(rows: list[Measurement], alone: list[Measurement]) -> list[str]:
    rate, ttft_ms = median_rate(rows), median_ttft_ms(rows)
    ratio, more = "", ""
    if alone:
        ratio = f"{rate / median_rate(alone):.3f}"
        more = f"{ttft_ms - median_ttft_ms(alone):+.2f}"
    kinds = dict.fromkeys(kind for row in rows for kind in row.cpu_us)
    cpu = {kind: statistics.median(row.cpu_us.get(kind, 0.0) for row in rows) for kind in kinds}
    last = rows[-1].result
    return [
        f"{rate:,.0f}",
        ratio,
        f"{ttft_ms:.2f}",
        more,
        _milliseconds(last.ttft_s, "p99"),
        _milliseconds(last.inter_token_s, "p50"),
        _milliseconds(last.event_loop_lag_s, "p99"),
        " ".join(f"{kind} {us:.0f}" for kind, us in cpu.items() if us >= 1),
    ]


def median_rate(rows: list[Measurement]) -> float:
    return statistics.median(row.result.output_tokens_per_s for row in rows)


def median_ttft_ms(rows: list[Measurement]) -> float:
    return 1e3 * statistics.median(
        0.0 if row.result.ttft_s is None else row.result.ttft_s.p50 for row in rows
    )


def _milliseconds(samples: Distribution | None, percentile: str) -> str:
    return "" if samples is None else f"{1e3 * getattr(samples, percentile):.1f}"


def _write_line(child: "subprocess.Popen[str]", line: str) -> None:
    if child.stdin is None:
        raise RuntimeError("a pipe was asked for")
    child.stdin.write(line + "\n")
    child.stdin.flush()


def _read_line(child: "subprocess.Popen[str]") -> str:
    if child.stdout is None:
        raise RuntimeError("a pipe was asked for")
    line = child.stdout.readline().strip()
    if not line:
        sys.exit(f"a process of the benchmark ended: status {child.wait(10)}")
    return line


if __name__ == "__main__":
    main()
