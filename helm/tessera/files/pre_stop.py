"""Runs in a pod that is about to end, before Ray there is told: requests under way may finish.

A worker asks Ray to drain its node, so that Serve ends the replicas here as it ends any replica, by
letting them drain, and starts others elsewhere; then it waits until they are gone. The head waits
until no other node is connected to it. Both give up at the timeout. Knows no Kubernetes but that
endpoints forget an ending pod within seconds. `ray drain-node` is hidden from Ray's help and
promises no stability: the chart pins the Ray that this was written for.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ENDPOINTS_DELAY_S = 5.0
GCS_PORT = 6379
ALIVE = 0
_POLL_S = 0.5
_ESTABLISHED = "01"
_REPLICA_TITLE = b"ray::ServeReplica:"


def num_replicas(proc: Path) -> int:
    """Serve replicas that run in this pod."""
    count = 0
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes().startswith(_REPLICA_TITLE)
        except OSError:  # the process has ended meanwhile
            continue
    return count


def num_other_nodes(proc: Path, port: int = GCS_PORT) -> int:
    """Established connections to the port that come from another address than our own end's."""
    count = 0
    for name in ("tcp", "tcp6"):
        table = proc / "net" / name
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for line in lines:
            _, local, remote, state, *_ = line.split()
            local_address, local_port = local.split(":")
            remote_address = remote.split(":")[0]
            is_remote = remote_address != local_address
            count += state == _ESTABLISHED and int(local_port, 16) == port and is_remote
    return count


def node_id_of(nodes: Iterable[Mapping[str, Any]], address: str) -> str | None:
    """The live node at an address, of `ray.nodes()`-like entries."""
    for node in nodes:
        if node["Alive"] and node["NodeManagerAddress"] == address:
            return str(node["NodeID"])
    return None


def live_nodes(gcs_address: str) -> list[Mapping[str, Any]]:
    """Asks the cluster without joining it."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    nodes = GcsClient(address=gcs_address).get_all_node_info()
    return [
        {
            "NodeID": node_id.hex(),
            "NodeManagerAddress": info.node_manager_address,
            "Alive": info.state == ALIVE,
        }
        for node_id, info in nodes.items()
    ]


def drain_command(gcs_address: str, node_id: str, timeout_s: float) -> list[str]:
    return [
        "ray",
        "drain-node",
        f"--address={gcs_address}",
        f"--node-id={node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the pod is ending",
        f"--deadline-remaining-seconds={int(timeout_s)}",
    ]


def wait_until_none(count: Callable[[], int], end_s: float) -> bool:
    """False if some were left at time.monotonic() == end_s."""
    while count():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def end_worker(gcs_address: str, pod_address: str, end_s: float) -> bool:
    """Drain this node and wait for its replicas. Raises subprocess.CalledProcessError."""
    proc = Path("/proc")
    if not num_replicas(proc):
        return True
    node_id = node_id_of(live_nodes(gcs_address), pod_address)
    if node_id is not None:
        remaining_s = max(end_s - time.monotonic(), 1.0)
        subprocess.run(drain_command(gcs_address, node_id, remaining_s), check=True)
    return wait_until_none(lambda: num_replicas(proc), end_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("head", "worker"), required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    options = parser.parse_args()
    end_s = time.monotonic() + options.timeout_s
    time.sleep(min(ENDPOINTS_DELAY_S, options.timeout_s))
    if options.role == "head":
        is_done = wait_until_none(lambda: num_other_nodes(Path("/proc")), end_s)
    else:
        is_done = end_worker(os.environ["RAY_ADDRESS"], os.environ["POD_IP"], end_s)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
