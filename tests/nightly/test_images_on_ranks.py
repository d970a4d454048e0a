"""Images on several ranks, each of which has whole eyes: plans carry patches to child processes."""

import pytest

from tests.fakes.tiny_vision import (
    image,
    prompt_of,
    reference_greedy,
    save_vision_model,
    vision_reference,
)
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.nightly


def test_tokens_of_two_ranks_are_transformers(tmp_path):
    folder = save_vision_model(tmp_path)
    reference = vision_reference(folder)
    prompts = [prompt_of(5, image(1, 4, 10), 7), prompt_of(12), prompt_of(image(2, 12, 6), 3)]
    config = EngineConfig(
        model=str(folder),
        tp_size=2,
        page_size=16,
        num_pages=64,
        num_cpu_threads=1,
        max_step_tokens=16,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    engine = build_local_engine(config, lambda done, total: None)
    tokens = {str(index): [] for index in range(len(prompts))}
    try:
        for index, prompt in enumerate(prompts):
            spans, images = prompt.spans, prompt.images
            engine.submit(
                GenerateRequest(str(index), prompt.ids, sampling, content_spans=spans, media=images)
            )
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
    finally:
        engine.close()
    assert list(tokens.values()) == [reference_greedy(reference, one, 64) for one in prompts]
