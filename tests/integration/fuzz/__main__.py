"""`tests/integration/isolated.sh python -m tests.integration.fuzz --minutes 10`

Starts a Ray and a service of its own (the built-in model on CPU), sends it nonsense for so long,
prints what was answered, by status. The exit status is 1 if anything failed.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.integration.fuzz.fuzzing import ENGINE, fuzz
from tests.integration.ray_cluster import local_ray
from tests.integration.services import running_service


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=18410, help="the first of three")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of raw bytes")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with (
        local_ray(),
        running_service("fuzz", arguments.port, engine=ENGINE) as service,
        tempfile.TemporaryDirectory() as folder,
    ):
        tally = fuzz(service, 60 * arguments.minutes, arguments.seed, Path(folder))
    print(tally.report())
    return 1 if tally.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
