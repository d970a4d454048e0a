"""Decode graphs of models in transformers' own code, on a CPU: a replay does what an eager step
does, padding rows and all, and nothing in them keeps a host's decision."""

import pytest

from tests.fakes.tiny_models import (
    LATENT,
    MIXTURES,
    SLIDING_WINDOW,
    THROUGH_TRANSFORMERS,
    TinyModel,
    save_tiny_model,
)
from tests.unit.workers.graphs.test_decode_graphs import (
    CPU,
    GREEDY,
    RANDOM,
    GraphedCpuRunner,
    config_of,
    generate,
    prompts_of,
)
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner

_GEMMA3 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": SLIDING_WINDOW}
CAPTURED = {
    **{name: THROUGH_TRANSFORMERS[name] for name in ("olmo2", "gpt2")},
    **{name: MIXTURES[name] for name in ("gpt_oss", "qwen3_moe")},
    "gemma3": TinyModel("gemma3_text", _GEMMA3),
    "cohere2": TinyModel("cohere2", {"sliding_window": SLIDING_WINDOW}),
    "deepseek_v2": LATENT["deepseek_v2"],
}


@pytest.mark.parametrize("name", CAPTURED)
def test_replayed_steps_give_the_tokens_of_eager_ones(name, tmp_path) -> None:
    """Three rows, of which the graph of four makes a fourth of padding."""
    folder = save_tiny_model(CAPTURED[name], tmp_path)
    config, prompts = (
        config_of(str(folder), max_step_tokens=48, model_impl="transformers"),
        prompts_of(3),
    )
    sampling = [GREEDY, RANDOM, GREEDY]
    eager = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, sampling)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    assert runner._model.capture_obstacle(256) == ""
    runner.use_graphs([1, 4])
    graphed = generate(config, runner, prompts, sampling)
    assert [r.token_ids for r in graphed] == [r.token_ids for r in eager]
    assert runner.capturer.num_replays > GREEDY.max_tokens // 2
