"""The GPU's stopwatch over a pretended stream: what it launches, and what counts."""

from types import SimpleNamespace

import pytest
import torch

from attention.tuning.stopwatch import CudaStopwatch
from attention.tuning.turns import MIN_LEAD_S, Turns

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


def test_every_turn_is_told(stream):
    watch = CudaStopwatch(torch.device("cpu"), lambda run: run)
    runs = {"a": lambda: stream.launch("a", MIN_LEAD_S / 2, 1e-3)}
    turns = watch.turns(runs, Turns(least=3, most=4))
    assert turns == {"a": pytest.approx([1e-3] * 4)}
