"""Mixtures of experts: the kernels by Triton's interpreter; routers against transformers' own."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.tiny_models import LATENT, tiny_config
from workers.layers.cuda import routers
from workers.layers.cuda.expert_routing import Chosen
from workers.models.deepseek_family import deepseek_spec


def test_kernels_compute_what_plain_torch_does() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.interpreted_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "all equal", done.stderr


def _transformers_router(name, config):
    if name == "deepseek_v2":
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

        return DeepseekV2TopkRouter(config)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    return DeepseekV3TopkRouter(config)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_grouped_routers_choose_as_transformers_do(name, monkeypatch) -> None:
    monkeypatch.setattr(routers, "counted", lambda weights, ids, _: Chosen(weights, ids, ids, ids))
    torch.manual_seed(3)
    config = tiny_config(LATENT[name])
    spec = deepseek_spec(config).experts
    theirs = _transformers_router(name, config)
    theirs.weight.data.normal_()
    correction = None
    if name == "deepseek_v3":
        correction = theirs.e_score_correction_bias.normal_(std=0.3)
    hidden = torch.randn(64, config.hidden_size)
    with torch.inference_mode():
        logits, weights, ids = theirs(hidden)
        chosen = routers.router_of(spec, correction)(logits)
    num_chosen = spec.num_chosen
    assert chosen.ids[:, num_chosen:].tolist() == [[8, 9]] * 64
    assert (chosen.weights[:, num_chosen:] == 1.0).all()
    ours, order = chosen.ids[:, :num_chosen].sort(dim=-1)
    expected, their_order = ids.sort(dim=-1)
    assert torch.equal(ours.long(), expected)
    assert torch.allclose(
        chosen.weights[:, :num_chosen].gather(1, order), weights.gather(1, their_order)
    )
