"""What stands in the way of a CUDA graph is found and named, on a CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.fakes.tiny_models import (
    LATENT,
    MIXTURES,
    THROUGH_TRANSFORMERS,
    TinyModel,
    save_tiny_model,
    tiny_config,
)
from workers.config import EngineConfig
from workers.layers.sharding import ShardContext
from workers.loading.loader import load_model
from workers.models.base import CausalLM
from workers.models.capture_trial import capture_obstacle
from workers.models.transformers_bridge import bridged
from workers.models.transformers_model import random_transformers_model
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
BRIDGED = {**THROUGH_TRANSFORMERS, **MIXTURES}


def obstacle_of(code) -> str:
    """For code over four numbers."""
    with torch.inference_mode():
        one, other = torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([5.0, 7.0, 0.0, 0.0])
        return capture_obstacle(CPU, partial(code, one), partial(code, other))


REFUSED = {
    "_local_scalar_dense": lambda x: x * x.max().item(),
    "aten.nonzero": lambda x: x[x.nonzero()[:, 0]],
    "aten.index.Tensor": lambda x: x[x > 1],
    "aten.index_put": lambda x: x.clone().index_put_((x > 1,), torch.ones_like(x)[x[:2].long()]),
    "aten.masked_select": lambda x: x.masked_select(x > 1),
    "aten._unique2": lambda x: x.unique(),
    "aten.bincount": lambda x: x.long().bincount(),
    "aten.repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "aten.equal": lambda x: x.equal(x),
    "Tensor.tolist": lambda x: x.tolist(),
    "Tensor.numpy": lambda x: x.numpy(),
    "aten.lift_fresh.default between host and device": lambda x: x * torch.tensor([2.0]),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_the_host_reads_or_copies_is_named(operation) -> None:
    obstacle = obstacle_of(REFUSED[operation])
    assert obstacle.startswith(operation.replace("_local", "aten._local"))
    assert "test_capture_trial.py:" in obstacle


CAPTURED = {
    "products": lambda x: (x[:, None] @ x[None]).relu().sum(-1),
    "indices": lambda x: x[x.argsort()],
    "places": lambda x: x.clone().index_put_((x.argsort(),), x),
    "one_value_under_a_mask": lambda x: x.masked_fill(x > 1, 0.0),
    "classes": lambda x: F.one_hot(x.long(), 8),
    "choices": lambda x: torch.where(x > 1, x, -x),
    "times": lambda x: x.repeat_interleave(2),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_only_the_device_sees_passes(name) -> None:
    assert obstacle_of(CAPTURED[name]) == ""


class RemembersCalls(nn.Module):
    """A host that decides by what it keeps, and looks at no tensor."""

    def __init__(self, decide):
        super().__init__()
        self._decide, self._num_calls = decide, 0

    def forward(self, x):
        self._num_calls += 1
        return self._decide(x, self._num_calls)


@pytest.mark.parametrize(
    ("decide", "operation"),
    [
        (lambda x, calls: x * calls, "aten.mul.Tensor"),
        (lambda x, calls: x.relu() if calls == 1 else x.abs(), "aten.relu.default"),
        (lambda x, calls: x.abs() if calls == 1 else x.abs().relu(), "aten.relu.default"),
    ],
)
def test_a_decision_of_the_host_that_a_replay_would_freeze_is_found(decide, operation) -> None:
    assert obstacle_of(RemembersCalls(decide)) == (
        f"{operation} is not the same for other tokens at other positions"
    )


def test_code_that_cannot_be_watched_is_not_captured() -> None:
    def fails(x):
        raise TypeError("injected")

    assert obstacle_of(fails) == "it cannot be watched: injected"


def in_transformers_code(tiny: TinyModel, max_context_len: int = 64) -> CausalLM:
    shard = ShardContext(SingleRank(), torch.float32, CPU)
    return bridged(random_transformers_model(tiny_config(tiny), shard, 0), max_context_len)


@pytest.mark.parametrize("name", BRIDGED)
def test_models_in_transformers_code_pass(name) -> None:
    """Their experts run as grouped products."""
    assert in_transformers_code(BRIDGED[name]).capture_obstacle(64) == ""


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_are_settled_at_the_start_pass(rope_type) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        factors = [1.0 + i / 4 for i in range(4)]
        rope |= {"short_factor": factors, "long_factor": [2 * factor for factor in factors]}
        rope["original_max_position_embeddings"] = 32
    model = in_transformers_code(TinyModel("llama", {"rope_parameters": rope}))
    assert model.capture_obstacle(64) == ""


def test_a_model_that_looks_at_its_text_is_named() -> None:
    model = in_transformers_code(TinyModel("jetmoe", {"kv_channels": 8}))
    assert model.capture_obstacle(64).startswith("Tensor.tolist (modeling_jetmoe.py:")


def test_a_model_row_by_row_is_not_captured() -> None:
    row_by_row = in_transformers_code(TinyModel("bloom", {"n_head": 8}))
    assert row_by_row.capture_obstacle(64).startswith("RowByRowCausalLM decides on the host")


@pytest.mark.parametrize(
    ("tiny", "obstacle"),
    [
        (LATENT["youtu"], ""),
        (LATENT["deepseek_v2"], "experts of these weights run one after another"),
        (MIXTURES["qwen3_moe"], "experts of these weights run one after another"),
    ],
    ids=["dense", "latents", "heads"],
)
def test_native_experts_that_look_on_the_host_are_named(
    tiny: TinyModel, obstacle: str, tmp_path: Path
) -> None:
    """Those of plain torch, as on a CPU."""
    config = EngineConfig(model=str(save_tiny_model(tiny, tmp_path)))
    loaded = load_model(config, SingleRank(), CPU, torch.bfloat16)
    assert loaded.implementation == "native"
    assert loaded.model.capture_obstacle(64)[: len(obstacle) or None] == obstacle
