"""Drafts over two ranks on GPUs: rank 0 proposes, and plans tell the other one."""

import pytest

from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import (
    BUILTIN,
    GREEDY,
    PROMPTS,
    TINY_PROMPTS,
    TINY_SAMPLING,
    alone,
    assert_likeliest,
    tiny_config,
)
from tests.gpu.parallel.running_engine import running

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS, NEEDS_FA3]

DRAFTS = {"tp_size": 2, "speculative": "ngram", "draft_policy": "fixed", "max_draft_tokens": 3}


def test_float32_text_with_drafts_equals_that_of_one_rank_without(tmp_path) -> None:
    config = tiny_config("llama3", tmp_path)
    with running({**config, **DRAFTS}) as engine:
        (together,) = engine.generate(TINY_PROMPTS, TINY_SAMPLING)
        engine.end()
    assert together == alone(config, TINY_PROMPTS, TINY_SAMPLING)


@pytest.mark.parametrize("has_peer_memory", [True, False], ids=["peer", "nccl"])
def test_ranks_verify_over_graphs(has_peer_memory) -> None:
    with running({**BUILTIN, **DRAFTS, "enable_peer_memory": has_peer_memory}) as engine:
        assert_likeliest(engine.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, captures=True))
        engine.end()
