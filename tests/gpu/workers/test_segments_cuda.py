"""Prefill and mixed steps over segment graphs on an NVIDIA GPU: eager steps' tokens, no waiting."""

import pytest

from tests.gpu.engines import (
    BUILTIN,
    CUDA,
    GREEDY,
    MIXED,
    NEAR_TIE,
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
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

FIRST_ONLY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class PreparedEngine:
    """An engine with all its graphs, and how many steps ran over segments."""

    def __init__(self, **changes):
        config = EngineConfig(**BUILTIN, enable_prefix_cache=False, **changes)
        self.runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
        self.engine = Engine.of_runner(config, self.runner)
        self.num_segmented = 0
        while self.engine.prepare_while_idle():
            pass
        run = self.runner._segments.run

        def counted(batch, rows):
            self.num_segmented += 1
            return run(batch, rows)

        self.runner._segments.run = counted

    def texts(self, prompts, sampling):
        found = [result.token_ids for result in self.engine.generate(prompts, sampling)]
        self.engine.check_integrity()
        return found


@NEEDS_FA3
@pytest.mark.parametrize("page_size", [1, 128])
def test_unpadded_segments_give_the_tokens_of_eager_steps(page_size) -> None:
    """A size's own number of tokens: the same kernels over the same shapes, not even a rounding
    differs."""
    prompts = [prompt[:64] for prompt in prompts_of(400, 4000) if len(prompt) >= 64][:16]
    assert len(prompts) == 16
    base = {"page_size": page_size, "attention_backend": "fa3_deterministic"}
    eager = EngineConfig(**BUILTIN, enable_prefix_cache=False, enable_cuda_graphs=False, **base)
    prepared = PreparedEngine(**base)
    assert prepared.texts(prompts, GREEDY) == generate(eager, prompts, GREEDY)
    assert prepared.num_segmented == 1


@NEEDS_FA3
@pytest.mark.parametrize(
    ("kv_cache_dtype", "backend"),
    [("auto", "fa3"), ("auto", "fa3_triton"), ("fp8_e4m3", "fa3_fp8")],
)
def test_padded_and_mixed_segments_choose_likeliest_tokens(kv_cache_dtype, backend) -> None:
    """Few tokens a step: prompts in pieces beside decoding rows."""
    prompts = prompts_of(60, 4000)
    prepared = PreparedEngine(
        kv_cache_dtype=kv_cache_dtype, attention_backend=backend, max_step_tokens=300
    )
    texts = prepared.texts(prompts, GREEDY)
    assert prepared.num_segmented > 20
    gaps = gaps_to_likeliest(prompts, texts)
    is_exact = kv_cache_dtype == "auto"
    assert gaps.max() < (NEAR_TIE if is_exact else 1.0)
    assert (gaps == 0).mean() > (0.95 if is_exact else 0.8)


@NEEDS_FA3
def test_sampling_features_work_on_segmented_steps() -> None:
    prompts = prompts_of(24, 4000)
    sampling = [MIXED[index % len(MIXED)] for index in range(len(prompts))]
    eager = EngineConfig(**BUILTIN, enable_cuda_graphs=False, max_step_tokens=256)
    prepared = PreparedEngine(max_step_tokens=256)
    assert share_equal(prepared.texts(prompts, sampling), generate(eager, prompts, sampling)) > 0.85
    assert prepared.num_segmented > 5


@NEEDS_FA3
def test_a_segmented_step_is_launched_without_waiting_for_the_device() -> None:
    prepared = PreparedEngine()
    engine, runner = prepared.engine, prepared.runner
    engine.generate(prompts_of(3, 4000), FIRST_ONLY)
    launches = []
    original = runner.launch

    def launch_strictly(plan):
        launches.append(plan.num_tokens)
        with no_waiting():
            return original(plan)

    engine._executor._launch = launch_strictly
    for index, prompt in enumerate(prompts_of(5, 4000)):
        engine.submit(GenerateRequest(f"r{index}", prompt, GREEDY))
        engine.step()
    while engine.has_work:
        engine.step()
    assert prepared.num_segmented >= 1 + 5
    assert len(launches) > 20
    engine.close()
