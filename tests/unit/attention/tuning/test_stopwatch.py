"""The GPU's stopwatch over a pretended stream: what it launches, and what counts."""

from types import SimpleNamespace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.torch_native import TorchNativeBackend
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.registration import ATTENTION_BACKENDS
from attention.timing import AttentionPhase
from attention.tuning.candidates import CandidateSet
from attention.tuning.layers import measured_layers
from attention.tuning.measure import AttentionMeasurement, ScratchSpace
from attention.tuning.points import StepPoint
from attention.tuning.stopwatch import CudaStopwatch
from attention.tuning.table import TuningTable
from attention.tuning.tune import tune
from attention.tuning.turns import MIN_LEAD_S, Turns
from tests.unit.attention.tuning.doubles import EXTEND
from tests.unit.attention.tuning.test_measure import config_of

SECOND_CYCLES = 2e9


class Stream:
    """The host's clock moves on while it launches; the device begins when its wait is over."""

    def __init__(self):
        self.now_s = self.device_s = 0.0
        self.done = []

    def sleep(self, cycles):
        self.device_s = max(self.device_s, self.now_s) + cycles / SECOND_CYCLES
        self.done.append("wait")

    def launch(self, name, host_s, device_s):
        self.now_s += host_s
        self.device_s = max(self.device_s, self.now_s) + device_s
        self.done.append(name)

    def synchronize(self, device):
        self.now_s = max(self.now_s, self.device_s)


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()

    class Event:
        def __init__(self, enable_timing):
            self.at_s = None

        def record(self):
            self.at_s = stream.device_s
            stream.done.append("event")

        def query(self):
            return stream.now_s >= self.at_s

        def elapsed_time(self, stop):
            return (stop.at_s - self.at_s) * 1e3

    facts = SimpleNamespace(L2_cache_size=64)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", stream.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr("attention.tuning.stopwatch.time.perf_counter", lambda: stream.now_s)
    return stream


def test_a_run_of_many_launches_is_timed_without_the_hosts_time(stream):
    """16 layers at 69 us of the host and 12 of the device, as 512 tokens' attention."""
    watch = CudaStopwatch(torch.device("cpu"), lambda run: run)

    def layers():
        for _ in range(16):
            stream.launch("layer", 69e-6, 12e-6)

    def graph():
        stream.launch("graph", 20e-6, 150e-6)

    seconds = watch.seconds({"layers": layers, "graph": graph})
    assert seconds == pytest.approx({"layers": 16 * 12e-6, "graph": 150e-6})
    assert stream.done[:4] == ["wait", "event", *["layer"] * 2]
    graph_at = stream.done.index("graph")
    assert stream.done[graph_at - 2 : graph_at + 2] == ["wait", "event", "graph", "event"]


class Launching(TorchNativeBackend):
    """A layer is launched in 69 us of the host, and attends for layer_s; a step's metadata takes
    the host 5 ms."""

    layer_s = 0.0
    stream = None

    def init_forward_metadata(self, forward_batch):
        self.stream.now_s += 5e-3
        super().init_forward_metadata(forward_batch)

    def forward(self, *arguments):
        self.stream.launch("layer", 69e-6, self.layer_s)
        return super().forward(*arguments)


@pytest.mark.parametrize("phase", [EXTEND, AttentionPhase.VERIFY])
def test_steps_without_graphs_are_told_by_their_device_and_chosen_by_it(stream, monkeypatch, phase):
    """The same backends, by the host's time, differ by nothing."""
    costs = {"early": 20e-6, "late": 18e-6}
    own = {
        name: type(name, (Launching,), {"layer_s": layer_s, "stream": stream})
        for name, layer_s in costs.items()
    }
    monkeypatch.setattr(ATTENTION_BACKENDS, "_classes", ATTENTION_BACKENDS._classes | own)
    config = config_of(*[LayerAttentionConfig()] * 16)
    candidates = CandidateSet(4, False, {phase: {name: (name,) * 16 for name in costs}})
    point = StepPoint(phase, 2, 4, 10)
    space = ScratchSpace.over(config, [point], MHATokenToKVPool)
    watch = CudaStopwatch(torch.device("cpu"), lambda run: run)
    layers = measured_layers(config, None)
    measure = AttentionMeasurement(candidates, space, layers, watch, uses_graphs=True)
    table = TuningTable({phase: tuple(costs)})
    table = tune(table, [point], measure, 9.0, lambda: stream.now_s)
    expected = {name: 16 * layer_s for name, layer_s in costs.items()}
    assert table.seconds[point] == pytest.approx(expected)
    chosen = table.choose(point)
    assert chosen.name == "late"
    assert chosen.reason(16) == "late 18.0 us, early 20.0 us"


def test_every_turn_is_told(stream):
    watch = CudaStopwatch(torch.device("cpu"), lambda run: run)
    runs = {"a": lambda: stream.launch("a", MIN_LEAD_S / 2, 1e-3)}
    turns = watch.turns(runs, Turns(least=3, most=4))
    assert turns == {"a": pytest.approx([1e-3] * 4)}
