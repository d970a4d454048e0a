"""Rows of one slot in one step, as forced tokens are, and the graphs that may run them."""

import msgspec
import numpy as np

from attention.forward_batch import ForwardMode
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.workers.graphs.test_decode_graphs import (
    CPU,
    SIZES,
    GraphedCpuRunner,
    ReplayableTorchBackend,
    config_of,
    decode_plan,
)
from workers.parallel.group import SingleRank


class FusingBackend(ReplayableTorchBackend):
    """As one whose kernels store keys and attend in one launch where rows are few."""

    def fuses_decode_projection(self, num_rows):
        return num_rows <= 4


class FusingRunner(GraphedCpuRunner):
    graph_backend = FusingBackend


def test_they_take_a_size_whose_kernels_store_keys_before_they_attend(tmp_path) -> None:
    config = config_of(str(save_tiny_model(NATIVE["llama3"], tmp_path)), num_pages=64)
    runner = FusingRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    for size in SIZES:
        runner.graphs.capture(size)
    masked = np.array([1], dtype=np.int32)
    rows = [9, 5, 6], [0] * 3
    forced = msgspec.structs.replace(decode_plan([0, 1, 1], *rows), masked_slots=masked)
    assert runner.graphs._key_for(forced).size == 8
    assert runner.graphs._key_for(decode_plan([0, 1, 2], *rows)).size == 4
    assert runner._inputs.build(forced, runner._timer).batch.forward_mode is ForwardMode.EXTEND
    runner.use_graphs([1, 4])
    assert not runner.graphs.covers(forced)
