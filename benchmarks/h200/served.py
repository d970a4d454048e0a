"""Servers over HTTP on one GPU, one after the other, all measured by vLLM's own client.

    python3 -m benchmarks.h200.served CONFIG --client VLLM --tessera now=.:SITE \
        [--tessera before=OLDER_TREE:SITE] [--vllm VLLM] [--loads "128 streams" ...] [--log FILE]

CONFIG: a Hugging Face config.json; weights are random. VLLM: a folder with vLLM's packages. SITE:
one with ours and the metadata of `tessera`. Servers run on their defaults but for the context
(8,192), the memory (0.85) and the running requests (256). Each is warmed up by a burst that does
not count. Prints a row a load: output tokens/s, TTFT p50 and p99, time per output token p50,
inter-token latency p99, end to end p50.
"""

import argparse
import json
import os
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

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.model_folder import make_model_folder

START_TIMEOUT_S = 300
SETTLE_S = 6.0
CLIENT_TIMEOUT_S = 240
TESSERA_PORT, VLLM_PORT = 8100, 8200


@dataclass(frozen=True, slots=True)
class Load:
    """num_streams: a closed loop of so many; else requests come by a Poisson process."""

    input_tokens: int
    output_tokens: int
    num_requests: int
    num_streams: int | None = None
    requests_per_s: float | None = None


WARM_UP = Load(512, 64, 256, num_streams=256)
LOADS = {
    "1 stream": Load(512, 128, 8, num_streams=1),
    "32 streams": Load(1024, 256, 128, num_streams=32),
    "128 streams": Load(1024, 256, 384, num_streams=128),
    "256 streams": Load(512, 256, 768, num_streams=256),
    "Poisson, 8 a second": Load(1024, 256, 160, requests_per_s=8.0),
    "Poisson, 14 a second": Load(1024, 256, 240, requests_per_s=14.0),
}
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to be started: its command, environment and working directory."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    url: str
    ready_path: str


def tessera(name: str, tree: str, site: str, model: str, extra: list[str]) -> Server:
    settings = {
        "http.port": TESSERA_PORT,
        "grpc.port": 9100,
        "metrics.port": 9500,
        "engine.load_format": "dummy",
        "engine.max_context_len": MAX_CONTEXT_LEN,
        "engine.gpu_memory_fraction": MEMORY_FRACTION,
        "engine.max_running_requests": MAX_RUNNING_REQUESTS,
    }
    named = [f"{key}={value}" for key, value in settings.items()] + extra
    options = [word for setting in named for word in ("--set", setting)]
    environment = {"PYTHONPATH": f"{Path(tree).resolve()}:{site}", "RAY_USAGE_STATS_ENABLED": "0"}
    code = "from service.cli import main; main()"
    arguments = ["-c", code, "serve", model, *options]
    url = f"http://127.0.0.1:{TESSERA_PORT}"
    return Server(name, arguments, environment, tree, url, "/health/ready")


def vllm_environment(site: str) -> dict[str, str]:
    return {
        "PYTHONPATH": site,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's sampler would have to be compiled.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def vllm(site: str, model: str) -> Server:
    options = {
        "model": model,
        "load-format": "dummy",
        "max-model-len": MAX_CONTEXT_LEN,
        "gpu-memory-utilization": MEMORY_FRACTION,
        "max-num-seqs": MAX_RUNNING_REQUESTS,
        "host": "127.0.0.1",
        "port": VLLM_PORT,
    }
    arguments = ["-m", "vllm.entrypoints.openai.api_server", *_flags(options)]
    url = f"http://127.0.0.1:{VLLM_PORT}"
    return Server("vllm", arguments, vllm_environment(site), "/", url, "/health")


@contextmanager
def running(server: Server, log: Path) -> Iterator[float]:
    """Seconds from its start to readiness. Raises RuntimeError if it does not come up."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *server.arguments],
            env={**os.environ, **server.environment},
            cwd=server.folder,
            stdout=file,
            stderr=file,
        )
    try:
        yield _wait_until_ready(server, process, log)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> float:
    started_s = time.monotonic()
    while process.poll() is None and time.monotonic() - started_s < START_TIMEOUT_S:
        try:
            with urllib.request.urlopen(server.url + server.ready_path, timeout=2):
                return time.monotonic() - started_s
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{server.name} does not come up: {log.read_text()[-3000:]}")


def measure(server: Server, load: Load, seed: int, model: str, client: str) -> dict[str, float]:
    """What `vllm bench serve` says of one load. Raises RuntimeError if a request failed."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as answer:
        name = json.load(answer)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {
            "backend": "openai",
            "base-url": server.url,
            "endpoint": "/v1/completions",
            "model": name,
            "tokenizer": model,
            "dataset-name": "random",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.num_requests,
            "temperature": 0,
            "seed": seed,
            "result-dir": folder,
            "result-filename": "result.json",
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,99",
        }
        if load.num_streams is not None:
            options["max-concurrency"] = load.num_streams
        if load.requests_per_s is not None:
            options["request-rate"] = load.requests_per_s
        command = ["-m", "vllm.entrypoints.cli.main", "bench", "serve", *_flags(options)]
        done = subprocess.run(
            [sys.executable, *command, "--ignore-eos", "--save-result", "--disable-tqdm"],
            env={**os.environ, **vllm_environment(client)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
        result: dict[str, float] = json.loads(Path(folder, "result.json").read_text())
    if result["completed"] != load.num_requests:
        raise RuntimeError(f"{result['completed']} of {load.num_requests} requests were answered")
    return {figure: result[figure] for figure in (*FIGURES, "median_e2el_ms")}


def _flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def run(server: Server, loads: list[str], model: str, client: str, log: Path) -> None:
    """Print the server's rows and append them to log, as JSON lines."""
    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder, "log")) as start_s:
        print(f"{server.name}: ready after {start_s:.1f} s", flush=True)
        time.sleep(SETTLE_S)
        measure(server, WARM_UP, 0, model, client)
        for seed, name in enumerate(loads, 1):
            figures = measure(server, LOADS[name], seed, model, client)
            row = {"server": server.name, "start_s": start_s, "load": name, **figures}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            cells = [f"{value:,.1f}" for value in figures.values()]
            print("|", " | ".join([server.name, name, *cells]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--client", required=True, help="vLLM's packages")
    parser.add_argument("--tessera", action="append", default=[], metavar="NAME=TREE:SITE")
    parser.add_argument("--vllm", metavar="SITE")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--set", action="append", default=[], help="of every Tessera")
    parser.add_argument("--log", type=Path, default=Path("served.jsonl"))
    parser.add_argument("--rounds", type=int, default=1, help="of all servers in turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model_folder(arguments.config, Path(folder)))
        servers = []
        for named in arguments.tessera:
            name, _, place = named.partition("=")
            tree, _, site = place.partition(":")
            servers.append(tessera(name, tree, site, model, arguments.set))
        if arguments.vllm:
            servers.append(vllm(arguments.vllm, model))
        for server in servers * arguments.rounds:
            run(server, arguments.loads, model, arguments.client, arguments.log)


if __name__ == "__main__":
    main()
