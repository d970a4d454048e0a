"""`tessera serve` with a fake engine, as a process of its own for tests that send it signals."""

import sys

from rich.console import Console

from service.command.launcher import RayTarget
from service.command.serve import run_service
from service.config import parse_config
from tests.fakes.engine_factory import FakeEngineFactory

PORTS = {"http": 18960, "grpc": 18961, "metrics": 18962}


def make_config():
    return parse_config(
        {
            "app_name": "signal-test",
            "drain_timeout_s": 20.0,
            "replica": {"cpus_per_rank": 0.0},
            **{name: {"port": port} for name, port in PORTS.items()},
        }
    )


if __name__ == "__main__":
    factory = FakeEngineFactory(step_s=0.02)
    sys.exit(run_service(make_config(), RayTarget(None), Console(), factory))
