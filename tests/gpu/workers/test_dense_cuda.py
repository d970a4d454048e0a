"""Native models without tests of their own on a GPU: text and graphs, in bfloat16."""

import pytest

from tests.fakes.tiny_models import VOCAB_SIZE
from tests.gpu.engines import GREEDY, generate, prompts_of, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.gpu.wide_models import save_wide_model
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps, rounded_gaps
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.models.features import ModelFeature

pytestmark = [*NEEDS_GPU, NEEDS_FA3]


@serves(ModelFeature.GPU, ModelFeature.GRAPHS)
@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3", "mixtral"])
def test_text_is_transformers_own_but_for_near_ties(name, tmp_path) -> None:
    """In chunks, together, with a prefix hit (the second round), with graphs; as without them."""
    model, prompts = str(save_wide_model(name, tmp_path)), prompts_of(8, VOCAB_SIZE, longest=150)
    settings = {"model_impl": "native", "dtype": "bfloat16", "num_pages": 200}
    settings |= {"max_running_requests": 16, "max_step_tokens": 128, "model": model}
    graphed, eager = (
        generate(EngineConfig(**settings, enable_cuda_graphs=is_graphed), prompts, GREEDY, rounds=2)
        for is_graphed in (True, False)
    )
    rounded = (rounded_gaps(tmp_path, prompts, graphed) > NEAR_TIE).float().mean()
    found = (gaps(tmp_path, prompts, graphed) > NEAR_TIE).float().mean()
    assert found < max(MAX_SHARE, 1.25 * rounded)
    assert share_equal(graphed, eager) > 0.9
