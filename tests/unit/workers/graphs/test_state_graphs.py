"""Decode graphs of models that keep states, on a CPU: states are gathered and scattered within a
replay, by slots that it reads itself; snapshots are moved around it."""

import random
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.tiny_reference import build_reference
from tests.fakes.tiny_reference import config_of as tiny_config_of
from tests.fakes.tiny_state_models import MAX_CONTEXT_LEN, STATE_MODELS, save_state_model
from tests.unit.workers.graphs.test_decode_graphs import CPU, MAX_ROWS, GraphedCpuRunner
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.models.qwen3_next import Qwen3NextForCausalLM
from workers.parallel.group import SingleRank
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.executor import StepOutcome
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams
from workers.sampling.state import SamplingState

NUM_TOKENS = 70  # a snapshot of a decoding row falls among them
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
NUM_FEW_TOKENS = 24
FEW = SamplingParams(temperature=0.0, max_tokens=NUM_FEW_TOKENS, ignore_eos=True)
# What the others show is shown for these every night.
SLOW = {"mamba2", "falcon_h1", "nemotron_h", "jamba"}


class StateGraphsRunner(GraphedCpuRunner):
    """Launches as on CUDA, with closures for graphs."""

    _launch = ModelRunner._launch
    _launch_by = CudaModelRunner._launch_by
    _graphs_of = CudaModelRunner._graphs_of
    _prepare_replay = CudaModelRunner._prepare_replay
    _behind_replay = CudaModelRunner._behind_replay
    _within_replay = CudaModelRunner._within_replay
    _draw = CudaModelRunner._draw
    _sample_replayed = CudaModelRunner._sample_replayed

    @property
    def _graphs(self):
        return self.graphs

    def run(self, plan):
        launch = partial(self._launch_by, self._graphs_of(plan))
        result = self._launch_within_memory(plan, launch).read()
        self.capture_after(plan)
        return StepOutcome(result, 0.0, 0.0, ())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ())
        for name in STATE_MODELS
    ],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_state_model(request.param, folder)
    return str(folder)


@pytest.fixture(scope="module")
def delta_rule(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_next")
    save_state_model("qwen3_next", folder)
    return str(folder)


def config_of(folder, **changes):
    settings = {"page_size": 4, "max_context_len": MAX_CONTEXT_LEN, "max_step_tokens": 48}
    # Experts of native models look on the host on a CPU.
    settings |= {"model_impl": "transformers"}
    return EngineConfig(model=folder, max_running_requests=MAX_ROWS, **{**settings, **changes})


def prompts_of(num):
    rng = random.Random(1)
    return [[rng.randrange(3, 90) for _ in range(rng.randrange(1, 100))] for _ in range(num)]


def generate(config, runner, rounds, sampling):
    """Token ids of every prompt of every round, by one engine."""
    engine = Engine.of_runner(config, runner)
    try:
        results = [result for prompts in rounds for result in engine.generate(prompts, sampling)]
        engine.check_integrity()
        return [result.token_ids for result in results]
    finally:
        engine.close()


def eager(config, rounds, sampling):
    return generate(config, ModelRunner(config, SingleRank(), CPU, print), rounds, sampling)


def graphed_runner(config, sizes=(1, 4, MAX_ROWS)):
    runner = StateGraphsRunner(config, SingleRank(), CPU, print)
    assert runner._model.capture_obstacle(MAX_CONTEXT_LEN) == ""
    runner.use_graphs(list(sizes))
    return runner


def test_replayed_steps_give_the_tokens_of_eager_ones(folder) -> None:
    """Three rows, of which the graph of four makes a fourth of padding, two greedy and one drawn;
    the second time behind a cached prefix."""
    config, prompts = config_of(folder), prompts_of(3)
    rounds = [prompts, [prompt + [5, 6] for prompt in prompts]]
    samplings = [GREEDY, RANDOM, GREEDY]
    wanted = eager(config, rounds, samplings)
    runner = graphed_runner(config)
    assert generate(config, runner, rounds, samplings) == wanted
    assert runner.capturer.num_replays > NUM_TOKENS


def test_native_layers_replay_too(tmp_path) -> None:
    """Without experts."""
    class_name, changes = STATE_MODELS["qwen3_next"]
    dense = {**changes, "mlp_only_layers": [0, 1, 2, 3]}
    build_reference(tiny_config_of("qwen3_next", class_name, dense), class_name, tmp_path)
    config, prompts = config_of(str(tmp_path), model_impl="native"), prompts_of(3)
    rounds = [prompts, [prompt + [5, 6] for prompt in prompts]]
    wanted = eager(config, rounds, FEW)
    runner = graphed_runner(config)
    assert isinstance(runner._model, Qwen3NextForCausalLM)
    assert generate(config, runner, rounds, FEW) == wanted
    assert runner.capturer.num_replays > NUM_FEW_TOKENS


def test_one_token_prompts_begin_from_no_state(delta_rule) -> None:
    """A step of one new token a row, of which some have no state yet, is no replay."""
    config = config_of(delta_rule)
    rounds = [[[7], [8], [9]], [[9], [8], [7]]]
    wanted = eager(config, rounds, FEW)
    runner = graphed_runner(config)
    assert generate(config, runner, rounds, FEW) == wanted
    assert runner.capturer.num_replays > NUM_FEW_TOKENS


def test_one_token_behind_a_cached_prefix_goes_on_from_its_snapshot(delta_rule) -> None:
    """Restored before the replay that reads it, whatever the slot held."""
    config, prompt = config_of(delta_rule), list(range(5, 70))
    rounds = [[prompt], [[7, 8, 9]], [prompt]]
    wanted = eager(config, rounds, FEW)
    runner = graphed_runner(config, sizes=[1])
    runner.graphs.capture(1)
    assert generate(config, runner, rounds, FEW) == wanted
    # Every token of the third round, the first one too.
    assert runner.capturer.num_replays == 3 * NUM_FEW_TOKENS - 2


def test_what_decodes_leaves_snapshots_that_others_go_on_from(delta_rule) -> None:
    config, prompts = config_of(delta_rule), prompts_of(4)

    def two_rounds(runner):
        """The second goes on from the first one's texts."""
        engine = Engine.of_runner(config, runner)
        first = engine.generate(prompts, GREEDY)
        longer = [p + own.token_ids + [3] for p, own in zip(prompts, first, strict=True)]
        second = engine.generate(longer, GREEDY)
        engine.close()
        return first, second

    wanted = two_rounds(ModelRunner(config, SingleRank(), CPU, print))
    found = two_rounds(graphed_runner(config))
    for own, other in zip(found, wanted, strict=True):
        assert [result.token_ids for result in own] == [result.token_ids for result in other]
    cached = [result.num_cached_tokens for result in found[1]]
    assert all(num > len(prompt) for num, prompt in zip(cached, prompts, strict=True))


def test_retracted_requests_go_on(delta_rule) -> None:
    config, prompts = config_of(delta_rule, num_pages=80), prompts_of(6)
    wanted = eager(config, [prompts], FEW)
    assert generate(config, graphed_runner(config), [prompts], FEW) == wanted


def test_sampling_that_lacks_memory_behind_a_replay_leaves_its_states(
    delta_rule, monkeypatch
) -> None:
    """Only the choice of tokens is repeated: a second replay would advance the states twice."""
    config, prompts = config_of(delta_rule), prompts_of(3)
    few = replace(RANDOM, max_tokens=NUM_FEW_TOKENS)
    wanted = eager(config, [prompts], few)
    runner = graphed_runner(config, sizes=[4])
    runner.graphs.capture(4)
    sample, num_refused = SamplingState.sample, []

    def one_row(self, logits, slots, seq_lens, drafts=None):
        if len(slots) > 1:
            num_refused.append(runner.capturer.num_replays)
            raise torch.OutOfMemoryError("injected")
        return sample(self, logits, slots, seq_lens, drafts)

    monkeypatch.setattr(SamplingState, "sample", one_row)
    assert generate(config, runner, [prompts], few) == wanted
    assert len(num_refused) > NUM_FEW_TOKENS // 2
