"""The engine on an NVIDIA GPU: graphs against eager steps and transformers; launches never wait."""

import statistics

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, eager_reference, save_tiny_model
from tests.gpu.engines import (
    BUILTIN,
    CUDA,
    GREEDY,
    MIXED,
    NEAR_TIE,
    NUM_TOKENS,
    gaps_to_likeliest,
    generate,
    prompts_of,
    share_equal,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    "name", ["llama3", "llama2_mha", "llama_biased", "qwen2", "qwen3", "gemma2", "gemma3"]
)
def test_float32_logits_equal_transformers_on_the_same_device(name, tmp_path) -> None:
    folder = save_tiny_model(NATIVE[name], tmp_path)
    prompts = prompts_of(6, VOCAB_SIZE, longest=60)
    reference = eager_reference(folder).eval().to(CUDA)
    expected = [
        reference.generate(
            torch.tensor([prompt], device=CUDA),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64, device=CUDA),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        attention_backend="torch_native",
        num_pages=400,
        page_size=4,
    )
    assert generate(config, prompts, GREEDY) == expected


@NEEDS_FA3
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_graphs_give_the_tokens_of_eager_steps(page_size) -> None:
    """As many rows as a captured size has, and attention that splits no row: the same kernels run
    over the same shapes, so not even a rounding may differ."""
    prompts = prompts_of(16, 4000)
    base = {**BUILTIN, "page_size": page_size, "attention_backend": "fa3_deterministic"}
    base["enable_prefix_cache"] = False
    eager = generate(EngineConfig(**base, enable_cuda_graphs=False), prompts, GREEDY)
    assert generate(EngineConfig(**base), prompts, GREEDY, rounds=3) == eager


@NEEDS_FA3
@pytest.mark.parametrize("num_prompts", [1, 3, 21])
def test_padded_graphs_choose_likeliest_tokens(num_prompts) -> None:
    prompts = prompts_of(num_prompts, 4000)
    gaps = gaps_to_likeliest(prompts, generate(EngineConfig(**BUILTIN), prompts, GREEDY, 3))
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95


@NEEDS_FA3
def test_graphs_read_no_stale_pages() -> None:
    """A small pool: pages change owners all the time, requests are retracted and come back."""
    prompts = prompts_of(40, 4000, longest=60)
    tight = EngineConfig(model="builtin", page_size=1, max_running_requests=16, num_pages=400)
    gaps = gaps_to_likeliest(prompts, generate(tight, prompts, GREEDY, rounds=2))
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95


@NEEDS_FA3
def test_sampling_features_work_on_graphed_steps() -> None:
    prompts = prompts_of(8, 4000)
    sampling = [MIXED[index % len(MIXED)] for index in range(len(prompts))]
    config = EngineConfig(**BUILTIN)
    eager = generate(EngineConfig(**BUILTIN, enable_cuda_graphs=False), prompts, sampling)
    assert share_equal(generate(config, prompts, sampling, rounds=3), eager) > 0.9


def warm_engine(config):
    """A runner, its engine after two rounds of 8 prompts (their size is captured), the prompts."""
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    prompts = prompts_of(8, 4000)
    for _ in range(2):
        engine.generate(prompts, GREEDY)
    return runner, engine, prompts


@NEEDS_FA3
def test_a_decode_step_is_launched_without_waiting_for_the_device() -> None:
    runner, engine, prompts = warm_engine(EngineConfig(**BUILTIN, enable_prefix_cache=False))
    launches = []
    original = runner.launch

    def launch_strictly(plan):
        if not plan.is_decode:
            return original(plan)
        launches.append(plan.step_id)
        with no_waiting():
            return original(plan)

    engine._executor._launch = launch_strictly
    engine.generate(prompts, GREEDY)
    engine.close()
    assert len(launches) > NUM_TOKENS // 2


WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaCtxSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMalloc",
    "cudaFree",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
}
EVENT_WAITS = {"cudaEventSynchronize", "cuEventSynchronize"}


def calls_within(events, range_name):
    """Names of what the host called inside each range of a name, one list a range."""
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    ranges = [event.time_range for event in host if event.name == range_name]
    return [
        [e.name for e in host if r.start <= e.time_range.start and e.time_range.end <= r.end]
        for r in ranges
    ]


@NEEDS_FA3
def test_a_decode_step_waits_for_nothing_but_the_end_of_the_one_before() -> None:
    """By the profiler's trace of what the host asked of CUDA."""
    config = EngineConfig(**BUILTIN, enable_prefix_cache=False, attention_timing_interval_steps=4)
    runner, engine, prompts = warm_engine(config)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", prompt, GREEDY))
    for _ in range(4):
        engine.step()
    original = runner.launch

    def launch_in_range(plan):
        assert plan.is_decode
        with record_function("launch"):
            return original(plan)

    engine._executor._launch = launch_in_range
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # torch warns, once a process, of a profiler that does not keep its events.
    with profile(activities=both, acc_events=True) as profiler:
        for _ in range(NUM_TOKENS // 2):
            with record_function("step"):
                engine.step()
    events = list(profiler.events())
    engine.close()
    launches, steps = calls_within(events, "launch"), calls_within(events, "step")
    assert len(launches) == len(steps) == NUM_TOKENS // 2
    for calls in launches:
        assert "cudaGraphLaunch" in calls
        assert not WAITS.union(EVENT_WAITS).intersection(calls)
    for calls in steps:
        assert not WAITS.intersection(calls)
        assert sum(call in EVENT_WAITS for call in calls) <= 1


@NEEDS_FA3
@pytest.mark.parametrize("backend", ["fa3", "fa3_triton"])
def test_timed_replays_give_the_same_tokens_and_plausible_times(backend) -> None:
    observer = AttentionRecords()
    config = EngineConfig(
        **BUILTIN,
        attention_backend=backend,
        enable_prefix_cache=False,
        attention_timing_interval_steps=4,
    )
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner, on_step=observer.on_step)
    prompts = prompts_of(8, 4000)
    results = [engine.generate(prompts, GREEDY)]
    while runner._graphs.capture_next():
        pass
    observer.decode.clear()
    results += [engine.generate(prompts, GREEDY) for _ in range(2)]
    assert runner._graphs.timed_sizes == [8]
    engine.close()
    timed = observer.decode
    assert len(timed) >= 2 * (NUM_TOKENS - 2) // 4
    assert {record.backend for record in timed} == {backend}
    # Another process may have the GPU in between: some take longer.
    assert all(record.seconds > 1e-6 for record in timed)
    assert statistics.median(record.seconds for record in timed) < 5e-3
    assert share_equal(*([r.token_ids for r in result] for result in results[1:])) > 0.95


class AttentionRecords:
    """Keeps what decode steps tell of their attention."""

    def __init__(self):
        self.decode = []

    def on_step(self, record):
        self.decode += [one for one in record.attention if one.phase == "decode"]


def test_dummy_weights_land_on_the_device(tmp_path) -> None:
    folder = save_tiny_model(NATIVE["qwen3"], tmp_path)
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16")
    loaded = load_model(config, SingleRank(), CUDA, torch.bfloat16)
    assert all(parameter.is_cuda for parameter in loaded.model.parameters())
