"""The timer of a captured graph: which events it reads, when, and what it says of a replay."""

from dataclasses import replace

import numpy as np
import pytest

from attention.backends.torch_native import TorchNativeBackend
from attention.graph_timing import GraphAttentionTimer
from attention.roofline import attention_step_cost
from attention.timing import AttentionPhase
from tests.unit.attention.cases import CaseSpec, build_case, rows_of


class Device:
    """Hands out events; its marks are past once it is said to have caught up."""

    def __init__(self):
        self.has_caught_up = False
        self.num_events = 0

    def new_event(self):
        self.num_events += 1
        return NumberedEvent(self.num_events)

    def new_mark(self):
        return Mark(self)


class NumberedEvent:
    """The nth event is passed at n**2 milliseconds."""

    def __init__(self, number):
        self.passed_ms = float(number**2)

    def record(self):
        """Recorded by the graph."""

    def query(self):
        raise AssertionError("an event node's state says nothing about the latest replay")

    def elapsed_time(self, end_event):
        return end_event.passed_ms - self.passed_ms


class Mark:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.has_caught_up = False

    def query(self):
        return self.device.has_caught_up

    def elapsed_time(self, end_event):
        raise AssertionError("a mark has no time")


@pytest.fixture
def case():
    return build_case(CaseSpec(rows_of((20, 1), (30, 1))))


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def timer(case, device):
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    return GraphAttentionTimer(backend, device.new_event, device.new_mark)


def run_layers(timer, case, num_layers):
    timer.start_recording()
    batch = replace(case.batch, attn_backend=timer)
    for _ in range(num_layers):
        case.layer(case.q, case.k, case.v, batch)


def test_a_replay_is_taken_once_and_only_when_the_device_has_passed_it(timer, case, device):
    run_layers(timer, case, 2)
    seq_lens = np.array([21, 31], dtype=np.int32)
    timer.on_replay(seq_lens)
    assert timer.is_pending
    assert timer.take() is None
    device.has_caught_up = True
    timing = timer.take()
    # Events 1 to 4 pass at 1, 4, 9 and 16 ms.
    assert timing.seconds == pytest.approx((4 - 1 + 16 - 9) / 1e3)
    cost = attention_step_cost(case.config, seq_lens, np.ones_like(seq_lens))
    assert (timing.bytes_read, timing.flops) == (cost.bytes_read, cost.flops)
    assert (timing.phase, timing.backend) == (AttentionPhase.DECODE, "torch_native")
    assert not timer.is_pending
    assert timer.take() is None


def test_a_trial_run_leaves_its_events_to_the_capture(timer, case, device):
    run_layers(timer, case, 2)
    run_layers(timer, case, 2)
    assert device.num_events == 4
    run_layers(timer, case, 1)
    timer.on_replay(np.array([21], dtype=np.int32))
    device.has_caught_up = True
    assert timer.take().seconds == pytest.approx((4 - 1) / 1e3)


def test_a_replay_on_top_of_one_that_was_not_taken_is_refused(timer):
    timer.on_replay(np.array([1], dtype=np.int32))
    with pytest.raises(RuntimeError, match="not taken"):
        timer.on_replay(np.array([2], dtype=np.int32))


def test_the_result_is_the_backends_own(timer, case):
    expected = case.layer(case.q, case.k, case.v, replace(case.batch, attn_backend=timer.backend))
    out = case.layer(case.q, case.k, case.v, replace(case.batch, attn_backend=timer))
    assert out.equal(expected)
