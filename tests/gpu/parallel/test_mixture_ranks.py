"""Two ranks on GPUs that divide the experts: the text is transformers' own but for near ties."""

import pytest

from tests.fakes.tiny_models import VOCAB_SIZE
from tests.gpu.engines import prompts_of
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import GREEDY
from tests.gpu.parallel.running_engine import running
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps
from tests.gpu.workers.test_mixtures_cuda import config_of

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS, NEEDS_FA3]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_text_of_two_ranks_is_transformers_own(ep_size, tmp_path) -> None:
    settings = {"model_impl": "native", "dtype": "bfloat16", "num_pages": 200}
    model = config_of("qwen2_moe", tmp_path).model
    prompts = prompts_of(8, VOCAB_SIZE, longest=150)
    with running({**settings, "model": model, "tp_size": 2, "ep_size": ep_size}) as engine:
        (outputs,) = engine.generate(prompts, [GREEDY] * len(prompts))
    assert (gaps(tmp_path, prompts, outputs) > NEAR_TIE).float().mean() < MAX_SHARE
