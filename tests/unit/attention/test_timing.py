"""Timers: what they sum, what they keep, and that they leave the attention as it was."""

from dataclasses import replace

import pytest
import torch

from attention import ForwardMode
from attention.backends.torch_native import TorchNativeBackend
from attention.cuda_timing import CudaEventAttentionTimer
from attention.roofline import attention_step_cost
from attention.timing import (
    AttentionPhase,
    AttentionTimer,
    CpuAttentionTimer,
    phase_of,
)
from tests.unit.attention.cases import CaseSpec, build_case, rows_of


class SteppingClock:
    """Each reading is one second after the last."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class FakeEvent:
    """A device event: done once the device has caught up."""

    device_is_done = False
    created = 0

    def __init__(self):
        FakeEvent.created += 1

    def record(self):
        """The device's clock is not modelled."""

    def query(self):
        return FakeEvent.device_is_done

    def elapsed_time(self, end_event):
        assert FakeEvent.device_is_done, "reading an event that is not past would wait"
        return 250.0


@pytest.fixture
def case():
    return build_case(CaseSpec(rows_of((20, 1), (30, 1))))


@pytest.fixture
def backend(case):
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    return backend


def run_step(timer, case, num_layers, batch=None):
    batch = case.batch if batch is None else batch
    timer.begin_step(batch)
    for _ in range(num_layers):
        case.layer(case.q, case.k, case.v, replace(batch, attn_backend=timer))
    return timer.end_step()


def test_a_steps_seconds_are_the_sum_over_its_layers(case, backend):
    timer = CpuAttentionTimer(backend, clock=SteppingClock())
    timing = run_step(timer, case, num_layers=3)
    assert timing.seconds == 3.0
    assert timing.phase is AttentionPhase.DECODE
    assert timing.backend == "torch_native"
    cost = attention_step_cost(case.config, case.batch.seq_lens_cpu, case.batch.extend_seq_lens_cpu)
    assert (timing.bytes_read, timing.flops) == (cost.bytes_read, cost.flops)


def test_steps_do_not_leak_time_into_each_other_and_are_drained_once(case, backend):
    timer = CpuAttentionTimer(backend, clock=SteppingClock())
    timings = [run_step(timer, case, num_layers) for num_layers in (2, 1)]
    assert [timing.seconds for timing in timings] == [2.0, 1.0]
    assert timer.drain() == timings
    assert timer.drain() == []


def test_the_result_is_the_backends_own(case, backend):
    timer = CpuAttentionTimer(backend)
    expected = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    timer.begin_step(case.batch)
    assert torch.equal(timer.forward(case.q, case.k, case.v, case.layer, case.batch), expected)
    assert timer.end_step().seconds > 0.0


@pytest.mark.parametrize("timer_class", [CpuAttentionTimer, CudaEventAttentionTimer])
def test_forward_outside_a_step_is_passed_on_unmeasured(case, backend, timer_class):
    timer = make_timer(timer_class, backend)
    expected = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert torch.equal(timer.forward(case.q, case.k, case.v, case.layer, case.batch), expected)
    assert timer.drain() == []


def make_timer(timer_class, backend) -> AttentionTimer:
    if timer_class is CudaEventAttentionTimer:
        return CudaEventAttentionTimer(backend, FakeEvent)
    return timer_class(backend)


@pytest.mark.parametrize("timer_class", [CpuAttentionTimer, CudaEventAttentionTimer])
def test_a_step_without_attention_gives_no_timing(case, backend, timer_class):
    timer = make_timer(timer_class, backend)
    assert run_step(timer, case, num_layers=0) is None
    assert timer.drain() == []


def test_steps_must_be_opened_and_closed_in_turn(case, backend):
    timer = CpuAttentionTimer(backend)
    with pytest.raises(RuntimeError, match="without begin_step"):
        timer.end_step()
    timer.begin_step(case.batch)
    with pytest.raises(RuntimeError, match="end_step is missing"):
        timer.begin_step(case.batch)


def test_an_undrained_timer_forgets_the_oldest_steps(case, backend, monkeypatch):
    monkeypatch.setattr(AttentionTimer, "MAX_KEPT_STEPS", 2)
    timer = CpuAttentionTimer(backend, clock=SteppingClock())
    for num_layers in (1, 2, 3):
        run_step(timer, case, num_layers)
    assert [timing.seconds for timing in timer.drain()] == [2.0, 3.0]


def test_events_are_read_only_when_past_and_then_reused(case, backend, monkeypatch):
    monkeypatch.setattr(FakeEvent, "device_is_done", False)
    monkeypatch.setattr(FakeEvent, "created", 0)
    timer = CudaEventAttentionTimer(backend, FakeEvent)
    assert run_step(timer, case, num_layers=4) is None
    assert timer.drain() == []
    FakeEvent.device_is_done = True
    assert [timing.seconds for timing in timer.drain()] == [1.0]
    run_step(timer, case, num_layers=4)
    assert [timing.seconds for timing in timer.drain()] == [1.0]
    assert FakeEvent.created == 8


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        (ForwardMode.EXTEND, "extend"),
        (ForwardMode.DRAFT_EXTEND, "extend"),
        (ForwardMode.DECODE, "decode"),
        (ForwardMode.TARGET_VERIFY, "verify"),
    ],
)
def test_phases_carry_the_names_of_the_metric(mode, phase):
    assert phase_of(mode) == phase
