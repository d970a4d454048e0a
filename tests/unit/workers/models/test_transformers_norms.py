"""RMSNorms in transformers' code: found by what they compute, replaced by one kernel."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.fakes.tiny_models import GEMMA, MIXTURES, THROUGH_TRANSFORMERS, TinyModel, tiny_config
from workers.models.transformers_norms import RowsNorm, fuse_norms, rms_norm_in_torch

BY_FAMILY = {
    **{name: THROUGH_TRANSFORMERS[name] for name in ("phi3", "olmo2")},
    "gpt_oss": MIXTURES["gpt_oss"],
    "gemma2": GEMMA["gemma2"],
    "gemma3": TinyModel("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "gpt_neox": THROUGH_TRANSFORMERS["gpt_neox"],
}


def random_body(tiny: TinyModel) -> nn.Module:
    torch.manual_seed(1)
    body = AutoModelForCausalLM.from_config(tiny_config(tiny), dtype=torch.bfloat16).model
    for parameter in body.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return body.eval()


def norms_of(body: nn.Module) -> list[nn.Module]:
    return [module for module in body.modules() if type(module).__name__.endswith("RMSNorm")]


class CountedKernel:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.is_contiguous()
        assert x.dim() == 2
        assert scale.dtype in (torch.bfloat16, torch.float32)
        self.num_calls += 1
        return rms_norm_in_torch(x, scale, eps)


@pytest.mark.parametrize("name", [name for name in BY_FAMILY if name != "gpt_neox"])
@torch.inference_mode()
def test_every_rms_norm_of_a_family_runs_as_the_kernel_and_computes_the_same(name) -> None:
    body = random_body(BY_FAMILY[name])
    norms = norms_of(body)
    inputs = [torch.randn(1, 6, norm.weight.shape[0], dtype=torch.bfloat16) + 0.3 for norm in norms]
    wanted = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
    kernel = CountedKernel()
    assert fuse_norms(body, kernel) == len(norms) > 0
    assert kernel.num_calls == 0
    for norm, x, before in zip(norms, inputs, wanted, strict=True):
        after = norm(x)
        # The same roundings in the same places: float32 sums may differ, and seldom tell.
        assert (after == before).float().mean() > 0.99
        torch.testing.assert_close(after, before, rtol=0.01, atol=1e-3)
    assert kernel.num_calls == len(norms)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("phi3", torch.bfloat16), ("olmo2", torch.float32), ("gemma2", torch.float32)],
)
def test_the_scale_has_the_type_that_tells_where_to_round(name, dtype) -> None:
    body = random_body(BY_FAMILY[name])
    fuse_norms(body, rms_norm_in_torch)
    assert {norm.forward.scale.dtype for norm in norms_of(body)} == {dtype}


@torch.inference_mode()
def test_a_models_states_stay_what_they_were() -> None:
    body = random_body(BY_FAMILY["gemma3"])
    tokens = torch.arange(3, 19).unsqueeze(0)
    before = body(tokens).last_hidden_state.float()
    kernel = CountedKernel()
    fuse_norms(body, kernel)
    after = body(tokens).last_hidden_state.float()
    assert kernel.num_calls == len(norms_of(body))
    assert (after - before).norm() < 0.02 * before.norm()


class TwoInputs(nn.Module):
    """A gated norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = rms_norm_in_torch(x, self.weight, self.eps)
        return normed if gate is None else normed * gate


class OtherEps(nn.Module):
    """Says one eps and adds another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_in_torch(x, self.weight, 1e-5)


class OfHeads(nn.Module):
    """Joins them, as xLSTM's does: takes (n, tokens, heads, size) and no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, num_tokens, num_heads, size = x.shape
        normed = nn.functional.layer_norm(x, (size,), eps=self.eps)
        return normed.reshape(n, num_tokens, num_heads * size) * self.weight


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(8, bias=False, dtype=torch.bfloat16),
        nn.LayerNorm(8, dtype=torch.bfloat16),
        nn.RMSNorm(8, eps=1e-6),  # in float32: stays as exact as it is
        nn.Linear(8, 8, bias=False, dtype=torch.bfloat16),
        TwoInputs(),
        OtherEps(),
        OfHeads(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_computes_anything_else_is_left_alone(module) -> None:
    assert fuse_norms(nn.Sequential(module), rms_norm_in_torch) == 0


def test_layer_norms_of_a_family_are_left_alone() -> None:
    body = AutoModelForCausalLM.from_config(
        tiny_config(BY_FAMILY["gpt_neox"]), dtype=torch.bfloat16
    )
    assert fuse_norms(body, rms_norm_in_torch) == 0


def test_heads_that_lie_token_by_token_are_not_copied_and_stay_so() -> None:
    """As transformers hands a projection's heads to their norms: (1, heads, tokens, size)."""
    projected = torch.randn(7, 3 * 8, dtype=torch.bfloat16)
    heads = projected.view(1, 7, 3, 8).transpose(1, 2)
    seen: list[int] = []

    def kernel(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append(x.data_ptr())
        return rms_norm_in_torch(x, scale, eps)

    scale = torch.rand(8) + 0.5
    normed = RowsNorm(kernel, scale, 1e-6)(heads)
    assert seen == [projected.data_ptr()]
    assert normed.stride() == (heads * 2).stride()
    torch.testing.assert_close(normed, rms_norm_in_torch(heads, scale, 1e-6))


def test_rows_that_are_not_dense_are_normalised_too() -> None:
    x = torch.randn(4, 20, dtype=torch.bfloat16)[:, 3:11]
    scale = torch.rand(8)
    normed = RowsNorm(rms_norm_in_torch, scale, 1e-6)(x)
    torch.testing.assert_close(normed, rms_norm_in_torch(x, scale, 1e-6))
