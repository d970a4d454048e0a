"""The policy as a function: what asks for replicas, what holds them, what lets them go."""

import math

from hypothesis import given
from hypothesis import strategies as st

from service.autoscaling.load import ModelLoad, ReplicaLoad
from service.autoscaling.policy import (
    DOWNSCALE_SHARE,
    IDLE_AFTER_S,
    ReplicaCounts,
    ScalingReason,
    ScalingTargets,
    wanted_replicas,
)

TARGETS = ScalingTargets(queued_tokens=1000, kv_usage=0.5, num_requests=10)
LONG_IDLE = ReplicaLoad(idle_s=IDLE_AFTER_S + 1)


def decide(*replicas, target, running=None, waiting=0, waiting_tokens=0, is_known=True):
    load = ModelLoad(tuple(replicas), waiting, waiting_tokens, is_known)
    counts = ReplicaCounts(target, len(replicas) if running is None else running)
    wanted = wanted_replicas(load, TARGETS, counts)
    return wanted.num_replicas, wanted.reason


def test_the_signal_that_asks_for_most_replicas_decides():
    queued = ReplicaLoad(queued_tokens=2500)
    assert decide(queued, target=1) == (3, ScalingReason.QUEUED_TOKENS)
    assert decide(ReplicaLoad(kv_usage=0.9), target=1) == (2, ScalingReason.KV_USAGE)
    assert decide(ReplicaLoad(num_requests=45), target=1) == (5, ScalingReason.REQUESTS)
    both = ReplicaLoad(queued_tokens=1500, num_requests=25)
    assert decide(both, target=1) == (3, ScalingReason.REQUESTS)


def test_a_load_at_its_target_asks_for_nothing_more():
    assert decide(ReplicaLoad(num_requests=10), ReplicaLoad(num_requests=10), target=2)[0] == 2


def test_a_replica_goes_only_when_the_others_have_room_to_spare():
    tight = [ReplicaLoad(num_requests=3)] * 3
    loose = [ReplicaLoad(num_requests=5), ReplicaLoad(), ReplicaLoad()]
    assert decide(*tight, target=3)[0] == 2
    assert decide(*[ReplicaLoad(num_requests=6)] * 3, target=3)[0] == 3
    assert decide(*loose, target=3)[0] == 1


def test_replicas_that_do_not_report_keep_the_others_from_being_stopped():
    assert decide(ReplicaLoad(num_requests=1), target=4, running=4) == (
        4,
        ScalingReason.MISSING_REPORTS,
    )
    assert decide(ReplicaLoad(num_requests=99), target=4, running=4)[0] == 10


def test_a_model_that_never_ran_is_started_once():
    assert decide(target=0, is_known=False) == (1, ScalingReason.FIRST_START)
    assert decide(target=1, is_known=False) == (1, ScalingReason.FIRST_START)


def test_a_waiting_request_wakes_the_model_however_short_it_is():
    assert decide(target=0, waiting=1, waiting_tokens=1) == (1, ScalingReason.WAITING)
    assert decide(target=0, waiting=3, waiting_tokens=2500) == (3, ScalingReason.QUEUED_TOKENS)


def test_a_model_is_let_go_only_when_every_replica_has_been_idle():
    busy = ReplicaLoad(idle_s=IDLE_AFTER_S / 2)
    assert decide(LONG_IDLE, target=1) == (0, ScalingReason.IDLE)
    assert decide(LONG_IDLE, busy, target=2) == (1, ScalingReason.ACTIVE)
    assert decide(LONG_IDLE, target=1, waiting=1)[0] == 1
    assert decide(target=0) == (0, ScalingReason.IDLE)


LOADS = st.builds(
    ReplicaLoad,
    queued_tokens=st.integers(0, 10_000),
    kv_usage=st.floats(0, 1),
    num_requests=st.integers(0, 300),
    idle_s=st.floats(0, 100),
)


@given(st.lists(LOADS, min_size=1, max_size=6), st.integers(1, 8))
def test_what_was_decided_is_stable_under_the_same_load(replicas, target):
    once, _ = decide(*replicas, target=target)
    again, _ = decide(*replicas, target=once)
    assert again == once


@given(st.lists(LOADS, min_size=1, max_size=6), st.integers(1, 8), LOADS)
def test_more_load_never_asks_for_fewer_replicas(replicas, target, more):
    less, _ = decide(*replicas, target=target)
    counts = ReplicaCounts(target, len(replicas))
    load = ModelLoad((*replicas, more), is_known=True)
    assert wanted_replicas(load, TARGETS, counts).num_replicas >= less


@given(st.lists(LOADS, min_size=1, max_size=6), st.integers(1, 8))
def test_what_remains_can_carry_the_load(replicas, target):
    num_requests = sum(replica.num_requests for replica in replicas)
    wanted, _ = decide(*replicas, target=target)
    assert wanted >= math.floor(num_requests / TARGETS.num_requests)
    if wanted < target and wanted > 0:
        assert num_requests <= wanted * TARGETS.num_requests * (DOWNSCALE_SHARE + 1e-6)
