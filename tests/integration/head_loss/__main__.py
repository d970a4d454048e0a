"""Command line. Exit status 1 if a promise was broken."""

import argparse
import os
import signal
import sys

from tests.integration.chaos.__main__ import ENVIRONMENT, STEP_S
from tests.integration.head_loss.plan import LOSSES, plan_losses

SEED = 7


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.head_loss")
    parser.add_argument("--redis", required=True, help="the program redis-server, or its path")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--real-streams", type=int, default=4, help="of these, on the real engine")
    parser.add_argument("--away-s", type=float, default=10.0)
    parser.add_argument("--between-s", type=float, default=40.0, help="for what was lost to return")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="of the fake engine")
    parser.add_argument("--quiet-s", type=float, default=20.0)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    os.environ.update(ENVIRONMENT)
    # What was started ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from tests.integration.chaos.applications import FAKE, REAL
    from tests.integration.chaos.report import describe
    from tests.integration.chaos.run import ChaosRun, Settings
    from tests.integration.head_loss.cluster import HeadLossCluster
    from tests.integration.head_loss.nodes import Redis

    settings = Settings(
        kills_s=float("inf"),
        num_streams=arguments.streams,
        num_real_streams=arguments.real_streams,
        seed=SEED,
        quiet_s=arguments.quiet_s,
        keeps_spares=False,
    )
    applications = [FAKE, REAL] if arguments.real_streams else [FAKE]
    cluster = HeadLossCluster(
        applications, Redis(arguments.redis), 2, arguments.away_s, arguments.step_s
    )
    plan = plan_losses(arguments.losses, arguments.between_s)
    run = ChaosRun(settings, cluster, plan)
    try:
        run.run()
    finally:
        print(describe(run.result))
    return 1 if run.result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
