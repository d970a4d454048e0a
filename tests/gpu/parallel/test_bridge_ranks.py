"""Models in transformers' own code that two GPUs share: its text but for near ties, with graphs."""

import pytest

from tests.fakes.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.gpu.engines import NUM_TOKENS, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import GREEDY
from tests.gpu.parallel.running_engine import running
from tests.gpu.workers.test_bridge_graphs import TINY
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS, NEEDS_FA3]


@pytest.mark.parametrize("name", ["olmo2", "gemma3"])
def test_text_of_two_ranks_is_transformers_own(name, tmp_path) -> None:
    """The second round has graphs of every size, and finds its prompts in the cache."""
    save_tiny_model(TINY[name], tmp_path)
    prompts = prompts_of(8, VOCAB_SIZE, longest=150)
    settings = {"model_impl": "transformers", "dtype": "bfloat16", "num_pages": 200, "tp_size": 2}
    with running({**settings, "model": str(tmp_path)}) as engine:
        first, second = engine.generate(prompts, [GREEDY] * len(prompts), rounds=2, captures=True)
    assert all(len(tokens) == NUM_TOKENS for tokens in second)
    assert share_equal(first, second) > 0.9
    assert (gaps(tmp_path, prompts, second) > NEAR_TIE).float().mean() < MAX_SHARE
