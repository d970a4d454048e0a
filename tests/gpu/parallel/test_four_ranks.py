"""Four ranks on GPUs that share the rows of their sums: the text of one."""

import pytest

from tests.gpu.needs import NEEDS_FA3, NEEDS_FOUR_GPUS, NEEDS_GPU
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
from tests.gpu.parallel.draft_record import drafts_of_ranks
from tests.gpu.parallel.drafters import (
    ALLOWED,
    FEW,
    FIXED,
    FLOAT32,
    SHARED,
    made_in,
    save_eagle,
    share_right,
)
from tests.gpu.parallel.running_engine import running

pytestmark = [*NEEDS_GPU, NEEDS_FOUR_GPUS]

TINY_ROW_BYTES = 64 * 4
BUILTIN_ROW_BYTES = 256 * 2
"""Of a token's hidden state."""


@pytest.mark.parametrize("one_shot_rows", [1, 8])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_float32_text_of_four_ranks_that_share_rows_equals_that_of_one(
    name, one_shot_rows, tmp_path
) -> None:
    """one_shot_rows: 1: rows are shared in all steps, selected ones and those of decode steps
    included, and the last rank has none of six; 8: while prompts are computed only."""
    config = tiny_config(name, tmp_path)
    with running({**config, "tp_size": 4}, one_shot_rows * TINY_ROW_BYTES) as engine:
        (together,) = engine.generate(TINY_PROMPTS, TINY_SAMPLING)
        engine.end()
    assert together == alone(config, TINY_PROMPTS, TINY_SAMPLING)


@NEEDS_FA3
@pytest.mark.parametrize("one_shot_rows", [1, 16])
def test_four_ranks_that_share_rows_choose_likeliest_tokens_over_graphs(one_shot_rows) -> None:
    """one_shot_rows: 16: fewer rows than requests, so that batches that end go both ways."""
    with running({**BUILTIN, "tp_size": 4}, one_shot_rows * BUILTIN_ROW_BYTES) as engine:
        rounds = engine.generate(PROMPTS, [GREEDY] * len(PROMPTS), 3, True)
        engine.end()
    assert_likeliest(rounds)


@pytest.mark.parametrize("one_shot_rows", [1, 8])
def test_drafts_of_a_head_over_four_ranks_that_share_rows_are_the_published_ones(
    one_shot_rows, tmp_path
) -> None:
    """It reads states of layers, of which each rank has its rows alone."""
    target, speculative, oracle = save_eagle(tmp_path)
    config = {"model": str(target), **FLOAT32, **FEW}
    drafts = {**FIXED, "tp_size": 4, "speculative": speculative}
    folder, one_shot_bytes = made_in(tmp_path / "drafts"), one_shot_rows * TINY_ROW_BYTES
    with running({**config, **drafts}, one_shot_bytes, folder) as engine:
        (together,) = engine.generate(SHARED, [ALLOWED] * 4)
        engine.end()
        told = drafts_of_ranks(folder, 4)
    assert together == alone(config, SHARED, [ALLOWED] * 4)
    assert share_right(told, oracle) == 1.0
