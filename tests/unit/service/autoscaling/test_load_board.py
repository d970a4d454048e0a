"""The registry's knowledge of load: who counts, who is forgotten, what ingresses are told."""

from service.autoscaling.board import (
    FAILURE_HOLDS_S,
    POLICY_EXPIRES_AFTER_S,
    REPORT_EXPIRES_AFTER_S,
    LoadBoard,
)
from service.autoscaling.load import (
    DemandReport,
    LoadMeter,
    ReplicaLoad,
    ReplicaLoadReport,
    load_key,
)
from service.deployments.registry import ReplicaRegistry
from tests.fakes.engine import FakeEngine
from workers.engine.protocol import EngineStats

KEY = load_key("Engine", "builtin")
INFO = FakeEngine().info


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def replica(replica_id, **load):
    return ReplicaLoadReport(KEY, replica_id, ReplicaLoad(**load), INFO)


def test_load_is_the_sum_of_what_replicas_and_ingresses_report():
    board = LoadBoard(Clock())
    board.report_load(replica("a", num_requests=3))
    board.report_load(replica("b", num_requests=4))
    board.report_load(replica("a", num_requests=1))
    board.report_demand(DemandReport(KEY, "in-1", 2, 30, None))
    board.report_demand(DemandReport(KEY, "in-2", 1, 5, None))
    load = board.load(KEY)
    assert sorted(r.num_requests for r in load.replicas) == [1, 4]
    assert (load.num_waiting_requests, load.num_waiting_tokens, load.is_known) == (3, 35, True)


def test_another_model_of_the_same_deployment_is_not_known():
    board = LoadBoard(Clock())
    board.report_load(replica("a"))
    assert board.load(KEY).is_known
    assert not board.load(load_key("Engine", "/models/other")).is_known


def test_what_falls_silent_or_withdraws_is_forgotten_but_the_model_stays_known():
    clock = Clock()
    board = LoadBoard(clock)
    board.report_load(replica("a"))
    board.report_load(replica("b"))
    board.report_demand(DemandReport(KEY, "in-1", 2, 30, None))
    board.forget("a")
    assert len(board.load(KEY).replicas) == 1
    clock.now_s += REPORT_EXPIRES_AFTER_S + 0.1
    load = board.load(KEY)
    assert (load.replicas, load.num_waiting_requests, load.is_known) == ((), 0, True)


def test_an_ingress_teaches_a_new_board_the_model():
    board = LoadBoard(Clock())
    board.report_policy(KEY, can_wake=True)
    assert board.availability()[0].model is None
    board.report_demand(DemandReport(KEY, "in-1", 0, 0, INFO))
    assert board.availability()[0].model == INFO
    assert board.load(KEY).is_known


def test_only_models_with_a_living_policy_are_available():
    clock = Clock()
    board = LoadBoard(clock)
    board.report_load(replica("a"))
    assert board.availability() == ()
    board.report_policy(KEY, can_wake=False)
    assert [told.can_wake for told in board.availability()] == [False]
    board.report_policy(KEY, can_wake=True)
    assert [told.can_wake for told in board.availability()] == [True]
    clock.now_s += POLICY_EXPIRES_AFTER_S
    assert board.availability() == ()


def test_a_failed_start_holds_for_a_while_or_until_a_replica_runs():
    clock = Clock()
    board = LoadBoard(clock)
    board.report_policy(KEY, can_wake=True)

    def has_failed():
        return board.availability()[0].has_failed

    board.report_start_failure(KEY)
    assert has_failed()
    clock.now_s += FAILURE_HOLDS_S - 1
    board.report_policy(KEY, can_wake=True)
    assert has_failed()
    clock.now_s += 1
    assert not has_failed()
    board.report_start_failure(KEY)
    board.report_load(replica("a"))
    assert not has_failed()


def test_a_replica_that_ran_before_says_nothing_of_a_later_start():
    board = LoadBoard(Clock())
    board.report_policy(KEY, can_wake=True)
    board.report_load(replica("a"))
    board.report_start_failure(KEY)
    board.report_load(replica("a"))
    assert board.availability()[0].has_failed
    board.report_load(replica("b"))
    assert not board.availability()[0].has_failed


def test_the_version_changes_exactly_when_ingresses_have_something_new_to_know():
    board = LoadBoard(Clock())
    versions = [board.version]
    board.report_policy(KEY, can_wake=True)
    versions.append(board.version)
    board.report_load(replica("a"))
    versions.append(board.version)
    assert len(set(versions)) == 3
    board.report_policy(KEY, can_wake=True)
    board.report_load(replica("a", num_requests=9))
    board.report_demand(DemandReport(KEY, "in-1", 2, 30, INFO))
    assert board.version == versions[-1]


def test_the_registry_view_carries_it_and_a_withdrawn_replica_is_no_load():
    registry = ReplicaRegistry(5.0, Clock())
    before = registry.view().version
    registry.loads.report_policy(KEY, can_wake=True)
    registry.loads.report_load(replica("a"))
    view = registry.view()
    assert view.version > before
    assert view.availability[0].key == KEY
    registry.withdraw("a")
    assert registry.loads.load(KEY).replicas == ()


def test_work_between_two_reads_of_the_meter_counts_as_activity():
    clock = Clock()
    meter = LoadMeter(clock)
    clock.now_s += 10
    assert meter.read(EngineStats()).idle_s == 10
    clock.now_s += 10
    assert meter.read(EngineStats(num_steps=5, num_finished=1)).idle_s == 0
    clock.now_s += 3
    assert meter.read(EngineStats(num_steps=5, num_finished=1)).idle_s == 3
    running = EngineStats(
        num_steps=5,
        num_finished=1,
        num_running=1,
        num_waiting=2,
        queued_tokens=7,
        num_pages=8,
        num_used_pages=2,
    )
    load = meter.read(running)
    assert load == ReplicaLoad(queued_tokens=7, kv_usage=0.25, num_requests=3, idle_s=0.0)
