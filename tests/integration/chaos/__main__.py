"""Command line of the chaos run. Exit status 1 if a promise was broken."""

import argparse
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
STEP_S = 0.1
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.chaos")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long parts are killed")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--real-streams", type=int, default=8, help="of these, on the real engine")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--min-wait-s", type=float, default=5.0)
    parser.add_argument("--max-wait-s", type=float, default=15.0)
    parser.add_argument("--quiet-s", type=float, default=20.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", help="names of KillKind; default: all")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    os.environ.update(ENVIRONMENT)
    # Ray reads its variables when it is imported.
    from tests.integration.chaos.applications import FAKE, REAL
    from tests.integration.chaos.cluster import ChaosCluster
    from tests.integration.chaos.kills import WEIGHTS, KillKind, plan_kills
    from tests.integration.chaos.report import describe
    from tests.integration.chaos.run import ChaosRun, Settings

    kinds = [KillKind[name] for name in arguments.kinds] if arguments.kinds else list(WEIGHTS)
    settings = Settings(
        kills_s=60 * arguments.minutes,
        num_streams=arguments.streams,
        num_real_streams=arguments.real_streams,
        seed=arguments.seed,
        quiet_s=arguments.quiet_s,
    )
    print(f"seed {settings.seed}", flush=True)
    applications = [FAKE, REAL] if settings.num_real_streams else [FAKE]
    plan = plan_kills(
        random.Random(settings.seed), kinds, arguments.min_wait_s, arguments.max_wait_s
    )
    run = ChaosRun(settings, ChaosCluster(applications, arguments.nodes, STEP_S), plan)
    try:
        run.run()
    finally:
        print(describe(run.result))
    return 1 if run.result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
