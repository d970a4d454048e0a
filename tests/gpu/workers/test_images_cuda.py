"""Prompts with images on a GPU: tokens are those of transformers' own code on it, and requests of
text alone go on in graphs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.tiny_vision import (
    image,
    prompt_of,
    reference_logits,
    save_vision_model,
    vision_reference,
)
from tests.gpu.beside_transformers import GpuEngine, compare
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WIDE, TALL, DOT = image(1, 4, 10), image(2, 12, 6), image(3, 2, 2)
PROMPTS = [
    prompt_of(3, TALL, 4, WIDE, 2),
    prompt_of(12),
    prompt_of(5, WIDE, 7),
    prompt_of(DOT, 9, DOT, seed=1),
    prompt_of(5, image(4, 4, 10), 7),
]
TOKEN_BYTES = 64 * 4
MAX_ERROR = 1e-3
MAX_GAP_BF16 = 0.5
MIN_LIKELIEST_BF16 = 0.85


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen2_5_vl"))


def start(folder, **changes):
    settings = {"dtype": "float32", "num_pages": 1024, "max_running_requests": 8, **changes}
    return GpuEngine(EngineConfig(model=str(folder), **settings))


def run(engine, prompts):
    """What engine.generate would return of prompts with images."""
    results = {}
    for index, prompt in enumerate(prompts):
        results[str(index)] = SimpleNamespace(token_ids=[], logprobs=(), error=None)
        engine.engine.submit(
            GenerateRequest(
                str(index),
                prompt.ids,
                GREEDY,
                content_spans=prompt.spans,
                media=prompt.images,
            )
        )
    while engine.engine.has_work:
        for output in engine.engine.step():
            assert output.error is None, output.error
            results[output.request_id].token_ids += output.token_ids
    engine.engine.check_integrity()
    return list(results.values())


def compared(reference, prompts, results):
    def of_tokens(index, tokens):
        return reference_logits(reference, replace(prompts[index], ids=tokens))

    return compare(of_tokens, [prompt.ids for prompt in prompts], results)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 16, "max_step_tokens": 8},
        {"page_size": 64, "media_store_bytes": 18 * TOKEN_BYTES},
    ],
    ids=["batched", "cut", "little_room"],
)
def test_float32_tokens_are_those_of_transformers(folder, changes):
    reference = vision_reference(folder).to(CUDA)
    engine = start(folder, **changes)
    for prompts in (PROMPTS, PROMPTS[2:], PROMPTS[:1]):
        comparison = compared(reference, prompts, run(engine, prompts))
        print("float32:", comparison)
        assert comparison.gaps.max() < MAX_ERROR, comparison
    engine.close()


def test_float32_requests_that_were_retracted_go_on(folder):
    engine = start(folder, page_size=1, num_pages=200, max_step_tokens=48)
    results = run(engine, PROMPTS)
    assert engine.engine.stats().num_preemptions > 0
    comparison = compared(vision_reference(folder).to(CUDA), PROMPTS, results)
    print("float32:", comparison)
    assert comparison.gaps.max() < MAX_ERROR, comparison
    engine.close()


@NEEDS_FA3
def test_bfloat16_tokens_are_near_ties_apart(folder):
    """Decode steps that show an image wait for nothing, as graphs of text do."""
    reference = vision_reference(folder).to(CUDA, torch.bfloat16)
    engine = start(folder, dtype="bfloat16")
    engine.launch_strictly(lambda plan: plan.is_decode)
    comparison = compared(reference, PROMPTS, run(engine, PROMPTS))
    print("bfloat16:", comparison)
    assert comparison.gaps.max() < MAX_GAP_BF16, comparison
    assert (comparison.gaps == 0).mean() > MIN_LIKELIEST_BF16, comparison
    num_replays = engine.num_replays
    text = PROMPTS[1:2]
    comparison = compared(reference, text, run(engine, text))
    assert comparison.gaps.max() < MAX_GAP_BF16, comparison
    assert engine.num_replays > num_replays + NUM_TOKENS // 2
    engine.close()
