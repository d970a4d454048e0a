"""Mixtures of experts in transformers' code: found by what they compute, run by our products."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.fakes.tiny_models import LATENT, MIXTURES, TinyModel, tiny_config
from workers.layers.routed_experts import SILU, Gating, gated, routed_in_torch
from workers.models.transformers_experts import distinct_experts, fuse_experts

BY_FAMILY = {
    **{name: MIXTURES[name] for name in ("gpt_oss", "qwen3_moe", "mixtral")},
    "deepseek_v2": LATENT["deepseek_v2_lite"],
    **{
        f"mixtral of {n}": TinyModel("mixtral", {"num_local_experts": n, "num_experts_per_tok": 2})
        for n in (2, 3, 5)
    },
}


def random_body(tiny: TinyModel, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(1)
    body = AutoModelForCausalLM.from_config(tiny_config(tiny), dtype=dtype).model
    for parameter in body.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    return body.eval()


def experts_of(body: nn.Module) -> list[nn.Module]:
    return [module for module in body.modules() if hasattr(module, "is_transposed")]


class CountedProducts:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, hidden, ids, weights, experts):
        num_experts, double_width, hidden_size = experts.gate_up.shape
        assert experts.down.shape == (num_experts, hidden_size, double_width // 2)
        assert experts.gate_up.is_contiguous()
        assert experts.down.is_contiguous()
        self.num_calls += 1
        return routed_in_torch(hidden, ids, weights, experts)


@pytest.mark.parametrize("name", BY_FAMILY)
@torch.inference_mode()
def test_the_experts_of_a_family_run_as_the_products_and_compute_the_same(name) -> None:
    body = random_body(BY_FAMILY[name])
    modules = experts_of(body)
    num_experts = modules[0].gate_up_proj.shape[0]
    hidden_size = body.config.hidden_size
    hidden = torch.randn(9, hidden_size, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(9)])
    shares = torch.rand(9, 2, dtype=torch.bfloat16)
    wanted = [module(hidden, ids, shares) for module in modules]
    num_bytes = sum(parameter.nbytes for parameter in body.parameters())
    products = CountedProducts()
    assert fuse_experts(body, products) == len(modules) > 0
    assert products.num_calls == 0
    for module, before in zip(modules, wanted, strict=True):
        after = module(hidden, ids, shares)
        assert (after - before).float().norm() < 0.02 * before.float().norm()
    assert products.num_calls == len(modules)
    assert sum(parameter.nbytes for parameter in body.parameters()) == num_bytes


@torch.inference_mode()
def test_a_models_states_stay_what_they_were() -> None:
    """Every token to every expert: which ones a token gets, is no matter of a rounding."""
    tiny = BY_FAMILY["gpt_oss"]
    body = random_body(TinyModel(tiny.model_type, {**tiny.changes, "num_experts_per_tok": 4}))
    tokens = torch.arange(3, 19).unsqueeze(0)
    before = body(tokens).last_hidden_state.float()
    products = CountedProducts()
    fuse_experts(body, products)
    after = body(tokens).last_hidden_state.float()
    assert products.num_calls == len(experts_of(body))
    assert (after - before).norm() < 0.05 * before.norm()


def test_gpt_oss_has_its_own_gate() -> None:
    body = random_body(BY_FAMILY["gpt_oss"])
    fuse_experts(body, CountedProducts())
    assert {module.forward.weights.gating for module in experts_of(body)} == {Gating(1.702, 7.0)}
    body = random_body(BY_FAMILY["mixtral"])
    fuse_experts(body, CountedProducts())
    assert {module.forward.weights.gating for module in experts_of(body)} == {SILU}


def test_layers_of_one_size_are_told_once() -> None:
    body = random_body(BY_FAMILY["mixtral"])
    assert distinct_experts(body) == []
    fuse_experts(body, CountedProducts())
    assert len(experts_of(body)) > 1
    (weights,) = distinct_experts(body)
    assert weights.gating == SILU


def test_float32_experts_stay_as_they_are() -> None:
    assert fuse_experts(random_body(BY_FAMILY["mixtral"], torch.float32), CountedProducts()) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "_apply_gate", lambda x: x.chunk(2, dim=-1)[1]),
        lambda module: setattr(module, "is_concatenated", False),
        lambda module: setattr(module, "has_post_expert_norm", True),
        lambda module: module.register_parameter(
            "extra", nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        ),
    ],
    ids=["another gate", "another layout", "a norm behind", "another weight"],
)
def test_what_computes_anything_else_is_left_alone(change) -> None:
    body = random_body(BY_FAMILY["mixtral"])
    for module in experts_of(body):
        change(module)
    before = [module.gate_up_proj.clone() for module in experts_of(body)]
    assert fuse_experts(body, CountedProducts()) == 0
    for module, weights in zip(experts_of(body), before, strict=True):
        assert torch.equal(module.gate_up_proj, weights)


@pytest.mark.parametrize(
    "gate",
    [
        lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
        lambda gate, up: nn.functional.silu(gate).clamp(max=40.0) * up.clamp(-40.0, 40.0),
    ],
    ids=["bent otherwise", "with a large limit"],
)
@pytest.mark.parametrize("size", [0.2, 2.0])
def test_a_gate_that_is_another_somewhere_is_left_alone(gate, size) -> None:
    """Whatever the weights are: those of the trial's tokens may be where both gates are alike."""
    body = random_body(BY_FAMILY["mixtral"])
    for module in experts_of(body):
        module.gate_up_proj.data *= size / 0.2
        module._apply_gate = lambda x: gate(*x.chunk(2, dim=-1))
    assert fuse_experts(body, CountedProducts()) == 0


def test_the_limit_cuts_gates_from_above_and_ups_from_both_sides() -> None:
    gate_up = torch.tensor([[9.0, 9.0], [-9.0, -9.0], [1.0, 0.5]])
    gate, up = torch.tensor([7.0, -9.0, 1.0]), torch.tensor([7.0, -7.0, 0.5]) + 1.0
    wanted = gate * torch.sigmoid(1.702 * gate) * up
    torch.testing.assert_close(gated(gate_up, Gating(1.702, 7.0))[:, 0], wanted)
