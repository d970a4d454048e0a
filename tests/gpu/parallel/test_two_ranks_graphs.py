"""Two ranks of the built-in model over graphs, on GPUs: Transformers' tokens, and those of one."""

import pytest

from tests.gpu.engines import share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import (
    BUILTIN,
    GREEDY,
    PROMPTS,
    SEEDED,
    alone,
    assert_likeliest,
)
from tests.gpu.parallel.running_engine import running

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS, NEEDS_FA3]


@pytest.fixture(scope="module", params=[True, False], ids=["peer", "nccl"])
def ranks(request):
    with running({**BUILTIN, "tp_size": 2, "enable_peer_memory": request.param}) as engine:
        yield engine
        engine.end()


def test_ranks_agree_on_sampled_tokens_of_graphed_steps(ranks) -> None:
    sampling = [GREEDY, SEEDED] * 4
    (together,) = ranks.generate(PROMPTS[:8], sampling)
    assert share_equal(together, alone(BUILTIN, PROMPTS[:8], sampling)) > 0.6


@pytest.mark.parametrize("captures", [False, True], ids=["capturing", "captured"])
def test_two_ranks_choose_likeliest_tokens_over_graphs(ranks, captures) -> None:
    """captures: all graphs before the first request, or while requests are served."""
    assert_likeliest(ranks.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, captures))
