"""How long a request waits for a model that was scaled to zero, and what that time is made of.

    RAY_AUTH_MODE=disabled tests/integration/isolated.sh \\
        python -m benchmarks.scale_from_zero [--cycles 5] [--fake]

Starts a whole service with the built-in model (--fake: an engine that loads nothing, so that only
Ray's and the service's own share is left), lets it go to zero, sends one request, and again. Bar:
with --fake, no more than 5 s to the first token; nearly all of it is Ray starting a process.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import httpx
import ray
from rich.console import Console
from rich.table import Table

from service.command.launcher import Launcher, RayTarget
from service.config import ServeConfig, parse_config
from service.deployments.control_plane import get_registry
from service.deployments.engine_factory import EngineFactory, create_engine
from tests.fakes.engine_factory import FakeEngineFactory

PORTS = {"http": 18800, "grpc": 18801, "metrics": 18802}
_TIMEOUT_S = 120.0


def make_config() -> ServeConfig:
    return parse_config(
        {
            "app_name": "scale-from-zero",
            "replica": {"cpus_per_rank": 0.1},
            "autoscaling": {"min_replicas": 0, "max_replicas": 1, "scale_to_zero_after_s": 0.5},
            **{name: {"port": port} for name, port in PORTS.items()},
        }
    )


def first_token_s(client: httpx.Client) -> float:
    body = {"model": "builtin", "prompt": [5, 6, 7], "max_tokens": 1}
    started_s = time.monotonic()
    client.post("/v1/completions", json=body, timeout=_TIMEOUT_S).raise_for_status()
    return time.monotonic() - started_s


def wait_until_gone(app_name: str) -> None:
    registry = get_registry(app_name)
    end_s = time.monotonic() + _TIMEOUT_S
    while ray.get(registry.status.remote()).num_replicas:
        if time.monotonic() > end_s:
            sys.exit(f"the service did not go to zero within {_TIMEOUT_S:g} s")
        time.sleep(0.1)


def measure(num_cycles: int, factory: EngineFactory) -> tuple[list[float], list[float]]:
    """Seconds to the first token: of requests that wake the model, and of those right after."""
    config = make_config()
    launcher = Launcher(config, RayTarget(None), factory)
    cold_s, warm_s = [], []
    try:
        launcher.connect()
        launcher.deploy()
        launcher.wait_until_ready(lambda status, state: None, lambda: False)
        with httpx.Client(base_url=f"http://127.0.0.1:{config.http.port}") as client:
            for _ in range(num_cycles):
                wait_until_gone(config.app_name)
                cold_s.append(first_token_s(client))
                warm_s.append(first_token_s(client))
    finally:
        launcher.stop()
    return cold_s, warm_s


def report(rows: dict[str, list[float]]) -> Table:
    table = Table(title="Seconds from a request to its first token")
    for column in ("", "min", "median", "max", "requests"):
        table.add_column(column, justify="right")
    for name, seconds in rows.items():
        figures = (min(seconds), statistics.median(seconds), max(seconds))
        table.add_row(name, *(f"{figure:.3f}" for figure in figures), str(len(seconds)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--fake", action="store_true")
    arguments = parser.parse_args()
    factory: Any = FakeEngineFactory() if arguments.fake else create_engine
    cold_s, warm_s = measure(arguments.cycles, factory)
    Console().print(report({"from zero": cold_s, "with a replica": warm_s}))


if __name__ == "__main__":
    main()
