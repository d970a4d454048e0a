"""The parts of the head's loss that need no Ray: its plan, and child processes with folders."""

import time

import psutil
import pytest

from tests.integration.chaos.kills import KillKind
from tests.integration.head_loss.cluster import HeadLossCluster
from tests.integration.head_loss.nodes import ChildProcess
from tests.integration.head_loss.plan import LOSSES, plan_losses


class Family(ChildProcess):
    def command(self):
        return ["sh", "-c", "sleep 60 & sleep 60"]


@pytest.fixture
def family():
    one = Family("test-family")
    one.start()
    yield one
    one.remove()


def grown(family):
    end_s = time.monotonic() + 10.0
    while len(family.family()) < 3:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return family.family()


def has_ended(process):
    """Its parent may have taken no notice yet."""
    try:
        return process.status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def test_whoever_is_removed_takes_its_children_and_its_folder_along(family):
    processes, folder = grown(family), family.folder
    family.remove()
    assert not family.is_running
    assert not folder.exists()
    end_s = time.monotonic() + 10.0
    while not all(has_ended(one) for one in processes):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    family.remove()


def test_who_starts_again_has_a_folder_of_its_own(family):
    before = family.folder
    family.remove()
    family.start()
    assert family.is_running
    assert family.folder != before
    assert (family.folder / "log").exists()


class ReluctantHead:
    """Ends at once until it has been started `num_starts` times."""

    def __init__(self, num_starts):
        self._num_starts = num_starts
        self.starts = 0

    @property
    def is_running(self):
        return self.starts >= self._num_starts

    def start(self):
        self.starts += 1

    def remove(self):
        pass


class ClusterOf(HeadLossCluster):
    def __init__(self, head):
        super().__init__([], None, 0, 0.0, 0.1)
        self._head = head
        self.deployed = 0

    def _has_dashboard(self):
        return self._head.is_running

    def _deploy(self):
        self.deployed += 1


def test_a_head_that_ends_before_it_serves_is_started_again():
    head = ReluctantHead(3)
    cluster = ClusterOf(head)
    cluster._replace_head()
    assert (head.starts, cluster.deployed) == (3, 1)


def test_others_are_lost_soon_after_the_head_and_losses_apart_from_each_other():
    plan = list(plan_losses(["HEAD", "HEAD_AND_OTHERS"], 40.0))
    assert [kind for _, kind in plan[:3]] == [KillKind.HEAD, KillKind.HEAD, KillKind.ENGINE]
    assert plan[1][0] == 40.0
    assert sum(wait_s for wait_s, _ in plan[2:]) < 15.0
    assert [kind for _, kind in plan[1:]] == list(LOSSES["HEAD_AND_OTHERS"])
