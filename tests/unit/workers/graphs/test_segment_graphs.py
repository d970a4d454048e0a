"""Segment graphs on a CPU: what is padded, captured and replayed between two layers' attention,
with a recorded closure in place of a CUDA graph."""

import random

import pytest
import torch

from tests.fakes.segmented_llama import SegmentedLlama
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.segment_graphs import SegmentGraphs, token_count_ladder
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams

SIZES = [4, 16, 48]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)


class ClosureCapturer:
    """A replay runs the closure again and puts its results where the record's were."""

    def __init__(self):
        self.num_replays = 0

    def try_out(self, run):
        return run()

    def record(self, run):
        out = run()

        def replay():
            self.num_replays += 1
            for kept, found in zip(flat(out), flat(run()), strict=True):
                kept.copy_(found)

        return replay, out


def flat(nested):
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for one in nested for tensor in flat(one)]


class SegmentedRunner(ModelRunner):
    """Runs every step that it can by segments; captures behind each step, or all at once."""

    def use_segments(self, is_ready):
        self._model.__class__ = SegmentedLlama
        self._model.pool = self._backend.token_to_kv_pool
        self.capturer = ClosureCapturer()
        num_accounts = len(self.pages_by_account)
        self.segments = SegmentGraphs(
            self._model, self.capturer, SIZES, self.dtype, CPU, num_accounts
        )
        self.steps = []
        while is_ready and self.segments.capture_next():
            pass

    def _final_states(self, inputs, wants_all):
        num_tokens = inputs.batch.num_tokens
        is_covered = self.segments.covers(num_tokens) and not wants_all
        self.steps.append((num_tokens, is_covered))
        if not is_covered:
            self.segments.capture_after(num_tokens)
            return super()._final_states(inputs, wants_all)
        return self.segments.run(inputs.batch, inputs.state_indices)


@pytest.fixture(scope="module", params=["llama3", "qwen3", "qwen2_windowed"])
def folder(request, tmp_path_factory):
    return str(save_tiny_model(NATIVE[request.param], tmp_path_factory.mktemp("segments")))


def config_of(folder, **changes):
    return EngineConfig(model=folder, page_size=4, max_running_requests=8, **changes)


def prompts_of(num):
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 70))] for _ in range(num)]


def segmented(config, is_ready=True):
    runner = SegmentedRunner(config, SingleRank(), CPU, print)
    runner.use_segments(is_ready)
    return runner


def texts(config, runner, prompts, sampling):
    engine = Engine.of_runner(config, runner)
    try:
        found = [result.token_ids for result in engine.generate(prompts, sampling)]
        engine.check_integrity()
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("is_ready", [True, False], ids=["captured", "capturing"])
@pytest.mark.parametrize("num_prompts", [1, 11])
def test_segments_give_the_tokens_of_whole_steps(folder, num_prompts, is_ready) -> None:
    """Prompts in chunks, alone and beside decoding rows, twice: the second time from the cache."""
    config = config_of(folder, max_step_tokens=40)
    prompts = prompts_of(num_prompts)
    sampling = [GREEDY, SEEDED] * num_prompts
    whole = ModelRunner(config, SingleRank(), CPU, print)
    prompts, sampling = [*prompts, *prompts], [*sampling[:num_prompts]] * 2
    expected = texts(config, whole, prompts, sampling)
    runner = segmented(config, is_ready)
    assert texts(config, runner, prompts, sampling) == expected
    num_covered = sum(is_covered for _, is_covered in runner.steps)
    assert runner.capturer.num_replays == num_covered * runner._model.geometry.num_layers
    assert num_covered == len(runner.steps) if is_ready else 0 < num_covered < len(runner.steps)


def test_steps_beyond_the_largest_size_run_whole(folder) -> None:
    config = config_of(folder)
    runner = segmented(config)
    texts(config, runner, [list(range(3, 60))], GREEDY)
    assert runner.steps[0] == (57, False)
    assert all(step == (1, True) for step in runner.steps[1:])


def test_a_step_that_lacks_its_size_has_it_captured(folder) -> None:
    config = config_of(folder)
    runner = segmented(config, is_ready=False)
    texts(config, runner, [list(range(3, 13))], GREEDY)
    assert runner.segments.captured_sizes == [4, 16]
    assert runner.segments.capture_next()
    assert runner.segments.captured_sizes == SIZES
    assert not runner.segments.capture_next()


def test_captures_and_padding_write_to_the_dummy_page_only(folder) -> None:
    config = config_of(folder, enable_prefix_cache=False)
    runner = segmented(config)
    k_pool, v_pool = runner._backend.token_to_kv_pool.get_kv_buffer(0)
    assert not k_pool[1:].any()
    assert not v_pool[1:].any()
    texts(config, runner, [list(range(3, 13))], SamplingParams(temperature=0.0, max_tokens=1))
    used = k_pool[1:].flatten(0, -3).flatten(1).any(dim=1)
    assert int(used.sum()) == 10


def test_what_is_no_number_in_an_earlier_step_does_not_reach_the_dummy_page(folder) -> None:
    config = config_of(folder, enable_prefix_cache=False)
    runner = segmented(config)
    runner.segments._attended.fill_(float("nan"))
    texts(config, runner, [list(range(3, 13))], SamplingParams(temperature=0.0, max_tokens=1))
    check_numbers(runner)


def test_what_is_no_number_when_a_size_is_captured_does_not_reach_the_dummy_page(folder) -> None:
    runner = segmented(config_of(folder), is_ready=False)
    runner.segments._attended.fill_(float("nan"))
    assert runner.segments.capture_next()
    check_numbers(runner)


def check_numbers(runner) -> None:
    for layer in range(runner._model.geometry.num_layers):
        for pool in runner._backend.token_to_kv_pool.get_kv_buffer(layer):
            assert pool.isfinite().all()


def test_prompt_logprobs_come_from_whole_steps(folder) -> None:
    config = config_of(folder)
    runner = segmented(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    texts(config, runner, [list(range(3, 13))], sampling)
    assert runner.steps == [(10, False)]


def test_the_ladder_ascends_to_the_limit_and_pads_little() -> None:
    ladder = token_count_ladder(1024)
    assert ladder == sorted(set(ladder))
    assert ladder[-1] == 1024
    for num_tokens in range(65, 1025):
        size = next(size for size in ladder if size >= num_tokens)
        assert size - num_tokens < min(128, 0.5 * num_tokens)
    assert token_count_ladder(40) == [16, 32, 40]
