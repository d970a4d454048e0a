"""Where backends take turns, each has graphs of its own, and steps replay those of their choice."""

from dataclasses import replace

import pytest

from attention.timing import AttentionPhase
from attention.tuning.candidates import CandidateSet
from attention.tuning.choice import TunedRoutes
from attention.tuning.points import StepPoint
from attention.tuning.router import GraphTunedAttention
from attention.tuning.table import TuningTable
from tests.unit.workers.graphs.test_decode_graphs import (
    CPU,
    GREEDY,
    SIZES,
    GraphedCpuRunner,
    ReplayableTorchBackend,
    config_of,
    folder,
    generate,
    prompts_of,
)
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams

__all__ = ["folder"]

DECODE, EXTEND = AttentionPhase.DECODE, AttentionPhase.EXTEND
FEW_TOKENS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
TIMES = {
    StepPoint(DECODE, rows, 1, prefix): times
    for rows in (1, max(SIZES))
    for prefix, times in ((0, {"short": 1.0, "long": 2.0}), (200, {"short": 3.0, "long": 1.0}))
}


class Named(ReplayableTorchBackend):
    """Counts its captures."""

    def __init__(self, name, *arguments):
        super().__init__(*arguments)
        self.capability = replace(self.capability, name=name)
        self.captured = []

    def init_forward_metadata_capture_cuda_graph(self, forward_batch):
        self.captured.append(forward_batch.batch_size)


def tuned_backend(config, *pools):
    layers = {name: (name,) * config.num_layers for name in ("short", "long")}
    names = dict.fromkeys((DECODE, EXTEND), ("short", "long"))
    tuned = TunedRoutes(
        CandidateSet(config.page_size, False, dict.fromkeys((DECODE, EXTEND), layers)),
        TuningTable(names, TIMES),
        config.max_context_len,
        config.num_layers,
    )
    backends = {name: Named(name, config, *pools) for name in layers}
    by_phase = {DECODE: backends, EXTEND: {"short": backends["short"]}}
    return GraphTunedAttention(config, *pools, tuned, by_phase)


class TunedRunner(GraphedCpuRunner):
    graph_backend = staticmethod(tuned_backend)

    @property
    def decoders(self):
        return self._backend._backends[DECODE]


@pytest.fixture
def runner(folder):
    runner = TunedRunner(config_of(folder), SingleRank(), CPU, print)
    runner.use_graphs(SIZES, interval_steps=2)
    return runner


def capture_all(runner):
    while runner.graphs._missing:
        assert runner.graphs.capture_next()


def test_the_likeliest_backend_of_every_size_is_captured_first(runner):
    likeliest, other = (one.capability.name for one in runner._backend.graph_backends(1))
    for _ in SIZES:
        runner.graphs.capture_next()
    assert runner.decoders[likeliest].captured == SIZES[::-1]
    assert runner.decoders[other].captured == []
    capture_all(runner)
    assert runner.decoders[other].captured == SIZES[::-1]


def test_texts_are_those_of_one_backend_whoever_decodes(runner, folder):
    config = config_of(folder)
    prompts = [[7] * 40, *prompts_of(2)]
    plain = ModelRunner(config, SingleRank(), CPU, print)
    expected = [one.token_ids for one in generate(config, plain, prompts, GREEDY)]
    capture_all(runner)
    assert [one.token_ids for one in generate(config, runner, prompts, GREEDY)] == expected
    assert runner.capturer.num_replays > 0


def test_a_step_replays_the_graph_of_its_lengths_and_is_timed_by_its_name(runner, folder):
    config = config_of(folder)
    capture_all(runner)
    replayed = set()
    for key, graph in runner.graphs._graphs.items():

        def replay(name=key.backend.capability.name, own=graph.replay):
            replayed.add(name)
            own()

        runner.graphs._graphs[key] = replace(graph, replay=replay)
    generate(config, runner, [[5] * 3], FEW_TOKENS)
    assert replayed == {"short"}
    generate(config, runner, [[5] * 90], GREEDY)
    assert replayed == {"short", "long"}
    while runner.graphs.capture_next():
        """Twins, once their graphs came to a turn."""
    runner.timings.clear()
    generate(config, runner, [[5] * 90], GREEDY)
    assert {timing.backend for timing in runner.timings} == {"long"}


def test_until_its_own_graph_is_there_a_step_takes_the_other_backends(runner, folder):
    runner.graphs._capture_key(runner.graphs._missing[-1])
    (only,) = runner.graphs._graphs
    assert only.size == SIZES[-1]
    before = runner.capturer.num_replays
    generate(config_of(folder), runner, prompts_of(8), GREEDY)
    assert runner.capturer.num_replays > before
