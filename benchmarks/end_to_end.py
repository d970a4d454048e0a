"""What Ray and the wire cost: tokens/s through Ray Serve over tokens/s of the engine in process.

    python benchmarks/end_to_end.py [--repeats N] [--json-file FILE] [--url URL]

One machine, one model, one seeded workload of `tessera bench`, closed loop. The engine runs alone
in a process of its own, before and after each time that `tessera serve` is started (unless --url
names a server) and measured over HTTP and gRPC; figures are medians over the repeats. Every run is
a fresh client process. The client's own CPU time counts against the served figures, as it does for
whoever shares a machine with its server.
Floor: a ratio of 1. Peers: Ray Serve's own streaming, which benchmarks/token_way.py measures.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_TESSERA = (sys.executable, "-c", "from service.cli import main; main()")
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 90.0

Report = dict[str, Any]
Reports = dict[str, list[Report]]

_ALONE = "in process"


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server listens. grpc_address None: it is not measured over gRPC."""

    url: str
    grpc_address: str | None


def main() -> None:
    """Measure, print the table and write the JSON."""
    arguments = parse_arguments()
    reports: Reports = {_ALONE: [run_in_process(arguments)], "HTTP": [], "gRPC": []}
    # The same token ids, whatever the server says of its vocabulary.
    arguments.vocab_size = reports[_ALONE][0]["workload"]["vocab_size"]
    for _ in range(arguments.repeats):
        if arguments.url is not None:
            measure_served(arguments, Served(arguments.url, arguments.grpc_address), reports)
        else:
            with running_server(arguments) as served:
                measure_served(arguments, served, reports)
        reports[_ALONE].append(run_in_process(arguments))
    summary = summarize(reports)
    print_summary(summary)
    text = json.dumps({"summary": summary, "reports": reports}, indent=2)
    if arguments.json_file is not None:
        arguments.json_file.write_text(text + "\n")
    else:
        print(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin", help="built-in or a model folder")
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--grpc-address", help="with --url: its gRPC address")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--input-len", default="uniform:32:128")
    parser.add_argument("--output-len", default="128")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of both engines, such as page_size=16",
    )
    parser.add_argument("--json-file", type=Path)
    return parser.parse_args()


def run_in_process(arguments: argparse.Namespace) -> Report:
    options = [part for option in arguments.engine for part in ("--engine", option)]
    target = ("--transport", "in-process", "--model", arguments.model, *options)
    return run_bench(arguments, *target)


def measure_served(arguments: argparse.Namespace, served: Served, reports: Reports) -> None:
    prompts = ("--vocab-size", str(arguments.vocab_size))
    http = ("--transport", "http", "--url", served.url)
    reports["HTTP"].append(run_bench(arguments, *http, *prompts))
    if served.grpc_address is not None:
        grpc = ("--transport", "grpc", "--url", served.grpc_address)
        reports["gRPC"].append(run_bench(arguments, *grpc, *prompts))


def run_bench(arguments: argparse.Namespace, *target: str) -> Report:
    """One `tessera bench` in a process of its own."""
    command = (
        *(*_TESSERA, "bench", *target),
        *("--concurrency", str(arguments.concurrency)),
        *("--num-requests", str(arguments.num_requests)),
        *("--warmup", str(arguments.concurrency)),
        *("--input-len", arguments.input_len, "--output-len", arguments.output_len),
        *("--seed", str(arguments.seed), "--output", "json"),
    )
    print(f"tessera bench {' '.join(target)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"tessera bench {' '.join(target)} ended with status {done.returncode}")
    report: Report = json.loads(done.stdout)
    if report["result"]["errors"]:
        sys.exit(f"requests failed, so there is nothing to compare: {report['result']['errors']}")
    return report


@contextmanager
def running_server(arguments: argparse.Namespace) -> Iterator[Served]:
    """`tessera serve` on free ports of this machine, ready when this yields, drained after."""
    http_port, grpc_port, metrics_port = free_ports(3)
    settings = dict(option.split("=", 1) for option in arguments.engine)
    environment = {
        **os.environ,
        **{f"TESSERA_ENGINE__{key.upper()}": value for key, value in settings.items()},
        "TESSERA_HTTP__PORT": str(http_port),
        "TESSERA_GRPC__PORT": str(grpc_port),
        "TESSERA_METRICS__PORT": str(metrics_port),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            (*_TESSERA, "serve", arguments.model), env=environment, stdout=log, stderr=log
        )
        try:
            wait_until_ready(server, f"http://127.0.0.1:{http_port}/health/ready")
            yield Served(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-8000:])
            raise
        finally:
            stop(server)


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Raises SystemExit if the server ends or takes too long."""
    started_s = time.monotonic()
    print(f"waiting for {url}", file=sys.stderr, flush=True)
    while time.monotonic() - started_s < _READY_TIMEOUT_S:
        if server.poll() is not None:
            sys.exit(f"tessera serve ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                print(f"ready in {time.monotonic() - started_s:.1f} s", file=sys.stderr)
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    sys.exit(f"tessera serve was not ready within {_READY_TIMEOUT_S:g} s")


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print("tessera serve did not stop and is killed", file=sys.stderr)
        server.kill()
        server.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def summarize(reports: Reports) -> dict[str, Any]:
    """Per way: its tokens/s in every run, their median over the in-process median, latencies."""
    in_process = statistics.median(rates_of(reports[_ALONE]))
    return {
        "num_cpus": os.cpu_count(),
        "ways": {
            way: {
                "output_tokens_per_s": rates_of(runs),
                "of_in_process": statistics.median(rates_of(runs)) / in_process,
                "ttft_p50_ms": median_ms(runs, "ttft_s"),
                "inter_token_p50_ms": median_ms(runs, "inter_token_s"),
            }
            for way, runs in reports.items()
            if runs
        },
    }


def rates_of(runs: list[Report]) -> list[float]:
    return [run["result"]["output_tokens_per_s"] for run in runs]


def median_ms(runs: list[Report], name: str) -> float:
    seconds: list[float] = [run["result"][name]["p50"] for run in runs]
    return statistics.median(seconds) * 1e3


def print_summary(summary: dict[str, Any]) -> None:
    table = Table("way", "tokens/s", "min", "max", "of in process", "TTFT ms", "inter-token ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for way, figures in summary["ways"].items():
        rates = figures["output_tokens_per_s"]
        table.add_row(
            way,
            *(f"{rate:,.1f}" for rate in (statistics.median(rates), min(rates), max(rates))),
            f"{figures['of_in_process']:.1%}",
            f"{figures['ttft_p50_ms']:,.2f}",
            f"{figures['inter_token_p50_ms']:,.2f}",
        )
    console = Console(stderr=True)
    console.print(table)
    console.print(f"{summary['num_cpus']} CPUs; medians")


if __name__ == "__main__":
    main()
