"""The script that pods run before they end, with a made-up /proc and a made-up cluster."""

import runpy
import subprocess
import time

import pytest

from tests.helm.rendering import CHART

SCRIPT = runpy.run_path(str(CHART / "files" / "pre_stop.py"))

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
GCS, OTHER = "18EB", "1F90"  # 6379 and 8080
HERE, THERE = "0100000A", "0200000A"


def proc_with(tmp_path, cmdlines=(), connections=()):
    for number, cmdline in enumerate(cmdlines, start=100):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes(cmdline)
    (tmp_path / "net").mkdir()
    rows = [
        f"   {index}: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000\n"
        for index, (local, remote, state) in enumerate(connections)
    ]
    (tmp_path / "net" / "tcp").write_text(HEADER + "".join(rows))
    return tmp_path


def test_it_counts_the_replicas_of_serve(tmp_path):
    cmdlines = [b"ray::ServeReplica:a:Engine", b"ray::IDLE", b"ray::ServeReplica:a:Ingress", b""]
    assert SCRIPT["num_replicas"](proc_with(tmp_path, cmdlines)) == 2


def test_it_counts_connections_of_other_nodes_only(tmp_path):
    connections = [
        (f"{HERE}:{GCS}", f"{THERE}:C000", "01"),
        (f"{HERE}:{GCS}", f"{HERE}:C001", "01"),  # this pod's own
        (f"{HERE}:{GCS}", f"{THERE}:C002", "06"),  # closed
        (f"{HERE}:{OTHER}", f"{THERE}:C003", "01"),  # another port
        (f"{HERE}:C004", f"{THERE}:{GCS}", "01"),  # the other end's port
    ]
    assert SCRIPT["num_other_nodes"](proc_with(tmp_path, connections=connections)) == 1


def test_it_finds_the_live_node_of_the_pod():
    nodes = [
        {"NodeID": "old", "NodeManagerAddress": "10.0.0.1", "Alive": False},
        {"NodeID": "new", "NodeManagerAddress": "10.0.0.1", "Alive": True},
        {"NodeID": "far", "NodeManagerAddress": "10.0.0.2", "Alive": True},
    ]
    assert SCRIPT["node_id_of"](nodes, "10.0.0.1") == "new"
    assert SCRIPT["node_id_of"](nodes, "10.0.0.3") is None


def test_it_stops_waiting_when_nothing_is_left_and_at_the_timeout():
    left = iter([2, 1, 0])
    assert SCRIPT["wait_until_none"](lambda: next(left), time.monotonic() + 30)
    assert not SCRIPT["wait_until_none"](lambda: 1, time.monotonic() - 1)


def test_ray_still_has_the_command_that_drains_a_node():
    """Hidden and without a promise: a Ray that lost it must fail here, not in a pod."""
    command = SCRIPT["drain_command"]("127.0.0.1:1", "ab", 5)
    from ray.scripts.scripts import drain_node

    flags = {option for parameter in drain_node.params for option in parameter.opts}
    assert {part.partition("=")[0] for part in command[2:]} <= flags
    (reason,) = [one for one in drain_node.params if "--reason" in one.opts]
    assert "DRAIN_NODE_REASON_PREEMPTION" in reason.type.choices


def test_ray_still_lists_nodes_the_way_it_is_asked():
    from ray._raylet import GcsClient, InnerGcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    assert hasattr(GcsClient, "__getattr__") or hasattr(GcsClient, "get_all_node_info")
    assert callable(InnerGcsClient.get_all_node_info)
    assert SCRIPT["ALIVE"] == GcsNodeInfo.GcsNodeState.ALIVE
    assert {"state", "node_manager_address"} <= set(GcsNodeInfo.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("arguments", [[], ["--role=worker"], ["--role=x", "--timeout-s=1"]])
def test_it_refuses_to_guess(arguments):
    script = CHART / "files" / "pre_stop.py"
    done = subprocess.run(["python3", str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
