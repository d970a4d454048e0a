"""`tessera serve` before an engine that costs nothing, for benchmarks/serve_overhead.py.

    python -m benchmarks.fake_service STEP_MS [NAME=VALUE ...]

Every stream gets a token every STEP_MS. Settings are those of `tessera serve --set`.
"""

import os
import sys

from rich.console import Console

from service.command.launcher import RayTarget
from service.command.serve import run_service
from service.config import load_config
from tests.fakes.engine_factory import FakeEngineFactory


def main() -> int:
    step_ms, *settings = sys.argv[1:]
    overrides = dict(setting.split("=", 1) for setting in settings)
    config = load_config(None, os.environ, {"replica.cpus_per_rank": 0.0, **overrides})
    factory = FakeEngineFactory(step_s=float(step_ms) / 1e3)
    return run_service(config, RayTarget(None), Console(), factory)


if __name__ == "__main__":
    sys.exit(main())
