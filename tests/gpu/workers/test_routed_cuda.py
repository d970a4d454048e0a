"""Backends of their own for prefill and for decode, over one pool, with graphs where both can."""

import pytest

from tests.gpu.engines import BUILTIN, CUDA, GREEDY, NEAR_TIE, gaps_to_likeliest, prompts_of
from tests.gpu.needs import NEEDS_FA3
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = NEEDS_FA3


@pytest.mark.parametrize(
    ("prefill", "decode", "has_graphs"),
    [
        ("fa3", "fa3_triton", True),
        ("fa3_triton", "fa3", True),
        ("torch_native", "fa3_triton", True),
        ("fa3", "torch_native", False),
    ],
)
def test_the_likeliest_tokens_whoever_attends(prefill, decode, has_graphs) -> None:
    prompts = prompts_of(12, 4000)
    config = EngineConfig(
        **BUILTIN, prefill_attention_backend=prefill, decode_attention_backend=decode
    )
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    try:
        for _ in range(2):
            tokens = [result.token_ids for result in engine.generate(prompts, GREEDY)]
        graphs = runner._graphs
        assert (graphs is not None and bool(graphs.captured_sizes)) is has_graphs
        assert engine.info.attention_backend == f"{prefill} (prefill), {decode} (decode)"
    finally:
        engine.close()
    gaps = gaps_to_likeliest(prompts, tokens)
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
