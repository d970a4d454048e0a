"""Rules for tokens hold on the device, with decode graphs and without."""

import random

import pytest

from tests.gpu.engines import BUILTIN, generate
from tests.gpu.needs import NEEDS_FA3
from tests.unit.workers.engine.test_token_rules import ALLOWED, NUM_REQUESTS, has, samplings
from workers.config import EngineConfig

pytestmark = NEEDS_FA3


@pytest.mark.parametrize("enable_cuda_graphs", [True, False])
def test_no_output_has_what_it_may_not_have(enable_cuda_graphs) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(5, 200) for _ in range(8)] for _ in range(NUM_REQUESTS)]
    config = EngineConfig(**BUILTIN, enable_cuda_graphs=enable_cuda_graphs)
    # The first round captures graphs, the second one replays them.
    outputs = generate(config, prompts, samplings(), rounds=2)
    for token_ids, sampling in zip(outputs, samplings(), strict=True):
        assert len(token_ids) == sampling.max_tokens
        assert set(token_ids) <= set(ALLOWED)
        assert not [word for word in sampling.bad_words if has(token_ids, word)]
