"""A fake replica in a process of its own, for tests that stop or kill it.

`python -m tests.fakes.replica_process REPLICA_ID CHANNEL_SETTINGS_AS_JSON` prints its address and
runs until its standard input closes.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from service.channel.address import ReplicaAddress
from service.channel.settings import ChannelSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, FakeReplica

ROOT = Path(__file__).parents[2]
STEP_S = 0.01


@contextlib.contextmanager
def replica_process(replica_id, settings=FAST):
    """The process and its address; killed at the end."""
    arguments = [replica_id, settings.model_dump_json()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.replica_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        told = json.loads(process.stdout.readline())
        yield process, ReplicaAddress(**told | {"key": bytes.fromhex(told["key"])})
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main():
    settings = ChannelSettings.model_validate_json(sys.argv[2])
    with FakeReplica(FakeEngine(step_s=STEP_S), settings, sys.argv[1]) as replica:
        told = asdict(replica.address) | {"key": replica.address.key.hex()}
        print(json.dumps(told), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
