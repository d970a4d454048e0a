"""What a CUDA runner does before anybody asks for anything and while nobody does, in what order."""

from types import SimpleNamespace

import pytest
import torch

from workers.config import EngineConfig
from workers.graphs.capture_attempts import CaptureAttempts
from workers.runner.cuda_model_runner import CudaModelRunner


def pieces(name, number, done):
    """A callable that has so many pieces of work."""
    left = [name] * number

    def do() -> bool:
        if left:
            done.append(left.pop())
            return True
        return False

    return do


@pytest.mark.parametrize("has_graphs", [True, False])
def test_graphs_come_before_what_the_model_has_left_to_do(has_graphs) -> None:
    done: list[str] = []
    runner = CudaModelRunner.__new__(CudaModelRunner)
    runner._graphs = SimpleNamespace(capture_next=pieces("graph", 2, done)) if has_graphs else None
    runner._segments = SimpleNamespace(capture_next=pieces("segment", 1, done))
    runner._model = SimpleNamespace(prepare_while_idle=pieces("model", 2, done))
    runner._captures = CaptureAttempts(is_alone=True, free_memory=lambda: None)
    while runner.prepare_while_idle():
        pass
    assert done == ["graph"] * (2 if has_graphs else 0) + ["segment", "model", "model"]


class OutOfMemoryModel:
    """Its products have no room beside the pool."""

    def product_seconds(self, num_tokens):
        raise torch.OutOfMemoryError("injected")


def test_a_start_goes_on_where_products_cannot_be_timed(caplog) -> None:
    runner = CudaModelRunner.__new__(CudaModelRunner)
    runner._model = OutOfMemoryModel()
    assert runner._time_products(EngineConfig(target_inter_token_ms=50.0)) == ()
    assert "no memory to time products" in caplog.text
