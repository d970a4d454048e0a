"""The registry of replicas: versions change with the view, silence is forgetting."""

from service.channel.address import ReplicaAddress
from service.deployments.registry import (
    MAX_FAILURES,
    START_EXPIRES_AFTER_S,
    IngressReport,
    ReplicaRegistry,
    StartFailure,
    StartProgress,
)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def address(replica_id, path="/p"):
    return ReplicaAddress(replica_id, "model", "node", path, None, 0, b"key")


def registry(expire_after_s=5.0):
    clock = Clock()
    return ReplicaRegistry(expire_after_s, clock), clock


def test_an_announcement_changes_the_version_once():
    board, _ = registry()
    before = board.view().version
    board.announce(address("a"))
    first = board.view()
    board.announce(address("a"))
    assert first.version != before
    assert board.view() == first
    assert first.replicas == (address("a"),)


def test_a_new_address_of_a_known_replica_changes_the_version():
    board, _ = registry()
    board.announce(address("a"))
    before = board.view().version
    board.announce(address("a", path="/q"))
    assert board.view().version != before


def test_a_silent_replica_is_forgotten_and_that_changes_the_version():
    board, clock = registry()
    board.announce(address("a"))
    clock.now_s += 4
    board.announce(address("b"))
    before = board.view().version
    clock.now_s += 2
    view = board.view()
    assert [a.replica_id for a in view.replicas] == ["b"]
    assert view.version != before


def test_withdrawing_is_immediate_and_harmless_twice():
    board, _ = registry()
    board.announce(address("a"))
    board.withdraw("a")
    before = board.view()
    board.withdraw("a")
    assert before.replicas == ()
    assert board.view() == before


def test_draining_is_seen_and_ended_for_a_new_deployment():
    board, _ = registry()
    before = board.view().version
    board.begin_drain()
    assert board.view().is_draining
    assert board.view().version != before
    board.end_drain()
    assert not board.view().is_draining


def test_a_successor_never_repeats_a_version():
    first, _ = registry()
    first.announce(address("a"))
    second, _ = registry()
    assert second.view().version > first.view().version


def test_progress_ends_with_the_announcement():
    board, _ = registry()
    board.report_progress(StartProgress("a", "model", "loading", 0.5))
    assert board.status().starting == (StartProgress("a", "model", "loading", 0.5),)
    board.announce(address("a"))
    assert board.status().starting == ()
    assert board.status().num_replicas == 1


def test_reports_of_a_dead_ingress_expire():
    board, clock = registry()
    board.report_ingress(IngressReport("i", True, False, 3))
    assert board.status().ingresses[0].num_live_requests == 3
    clock.now_s += 6
    assert board.status().ingresses == ()


def test_failures_to_start_are_kept_until_the_next_deployment_and_are_bounded():
    board, clock = registry()
    for index in range(MAX_FAILURES + 2):
        board.report_failure(StartFailure(f"replica-{index}", "no such model"))
    clock.now_s += 1000
    assert len(board.status().failures) == MAX_FAILURES
    assert board.status().failures[-1].process_id == f"replica-{MAX_FAILURES + 1}"
    board.end_drain()
    assert board.status().failures == ()


def test_progress_of_a_replica_that_never_arrives_is_forgotten():
    board, clock = registry()
    board.report_progress(StartProgress("dead", "model", "loading", 0.5))
    clock.now_s += START_EXPIRES_AFTER_S - 1
    board.report_progress(StartProgress("slow", "model", "warming up", 0.0))
    assert len(board.status().starting) == 2
    clock.now_s += 2
    assert [progress.replica_id for progress in board.status().starting] == ["slow"]


def test_progress_ends_with_a_failure():
    board, _ = registry()
    board.report_progress(StartProgress("a", "model", "loading", 0.5))
    board.report_progress(StartProgress("b", "model", "loading", 0.5))
    board.report_failure(StartFailure("a", "no such folder"))
    assert [progress.replica_id for progress in board.status().starting] == ["b"]
