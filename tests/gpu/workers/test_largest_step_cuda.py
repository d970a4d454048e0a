"""What a start has tried is enough for any step, the first one with penalties, too."""

import torch

from tests.gpu.engines import BUILTIN, prompts_of
from tests.gpu.needs import NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUM_ROWS = 256
ROUNDING_BYTES = 1 << 20
"""What blocks of other sizes may be rounded up by."""
SAMPLING = SamplingParams(
    seed=1,
    top_p=0.9,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    allowed_token_ids=tuple(range(10, 500)),
    logprobs=1,
    max_tokens=8,
    ignore_eos=True,
)


def test_the_first_penalties_take_no_more_than_the_start_has_tried() -> None:
    settings = {**BUILTIN, "max_running_requests": NUM_ROWS, "enable_cuda_graphs": False}
    engine = Engine.from_config(EngineConfig(**settings))
    try:
        tried = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.generate(prompts_of(NUM_ROWS, 4096), SAMPLING)
        tables = NUM_ROWS * 4096 * (1 + 4 + 1)
        assert torch.cuda.memory_allocated() >= before + tables
        assert torch.cuda.max_memory_allocated() <= tried + ROUNDING_BYTES
    finally:
        engine.close()
