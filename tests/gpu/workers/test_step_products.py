"""How long a step's products take by its number of tokens, timed at a start on the device."""

import numpy as np
import pytest

from tests.gpu.engines import BUILTIN, CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.scheduler.step_filling import TILE_TOKENS

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

TARGET = {**BUILTIN, "target_inter_token_ms": 55.0, "max_step_tokens": 2048}
NUM_SIZES = 2048 // TILE_TOKENS


def runner_of(**changes):
    config = EngineConfig(**{**TARGET, **changes})
    return config, make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)


def test_products_are_timed_for_every_number_of_tiles() -> None:
    config, runner = runner_of()
    product_s = np.array(runner.scheduler_config(config).product_s)
    assert product_s.shape == (NUM_SIZES,)
    assert (product_s > 0.0).all()
    assert product_s[-1] < 1.0
    runner.close()


@pytest.mark.parametrize("changes", [{"target_inter_token_ms": None}, {"max_step_tokens": 255}])
def test_nothing_is_timed_where_nothing_asks(changes) -> None:
    config, runner = runner_of(**changes)
    assert runner.scheduler_config(config).product_s == ()
    runner.close()
