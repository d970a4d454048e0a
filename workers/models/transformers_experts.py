"""Experts of transformers' mixtures in two grouped products, where theirs take some forty launches.

transformers keeps a block's experts in two stacked tensors, in one of several layouts, with a gate
of the family's own. Which ones they are is known by what the module computes. Knows no model and no
routing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.layers.routed_experts import (
    SILU,
    Gating,
    RoutedProducts,
    RoutedWeights,
    gated,
    routed_in_torch,
)

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_MAX_EXPERTS = 256
"""The kernel that groups pairs looks at all experts at once."""
_NUM_TRIAL_TOKENS = 3
_NUM_TRIAL_CHOICES = 2
_GATE_SIZES = (1.0, 6.0, 1000.0)
"""Of the trial's gate inputs. Small ones tell what is bent otherwise around zero, others find a
limit, gpt-oss's or a larger one."""
_MAX_ERROR = 0.02
_STACKED = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Stands for the forward of a module of experts."""

    products: RoutedProducts
    weights: RoutedWeights

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.products(hidden_states, top_k_index, top_k_weights, self.weights)


@torch.inference_mode()
def fuse_experts(body: nn.Module, products: RoutedProducts) -> int:
    """Let modules of 16-bit experts within body run as products; returns how many they are.

    Their parameters are laid out anew, module by module, as products takes them.
    """
    num_fused = 0
    for module in body.modules():
        if _are_experts(module) and _fuse(module, products):
            num_fused += 1
    return num_fused


def distinct_experts(body: nn.Module) -> list[RoutedWeights]:
    """Of what fuse_experts has replaced within body, one of each size and gate."""
    found: dict[tuple[object, ...], RoutedWeights] = {}
    for module in body.modules():
        forward = module.forward
        if isinstance(forward, RoutedExperts):
            weights = forward.weights
            key = weights.gate_up.shape, weights.gating, weights.gate_up_bias is None
            found.setdefault(key, weights)
    return list(found.values())


def is_of_experts(module: Any) -> bool:
    """Whether transformers' use_experts_implementation has made it a module of experts."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def _are_experts(module: Any) -> bool:
    """Of those, what has a gate and nothing behind the experts."""
    is_known = is_of_experts(module) and module.has_gate
    if not is_known or getattr(module, "has_post_expert_norm", False):
        return False
    names = {*_STACKED, *(_BIASES if module.has_bias else ())}
    tensors = dict(module.named_parameters())
    if set(tensors) != names or any(module.named_buffers()):
        return False
    first = tensors[_STACKED[0]]
    return (
        first.dtype in _KERNEL_DTYPES
        and first.dim() == 3
        and _NUM_TRIAL_CHOICES <= first.shape[0] <= _MAX_EXPERTS
    )


def _fuse(module: Any, products: RoutedProducts) -> bool:
    gating = _gating_of(module)
    if gating is None:
        return False
    weights = _laid_out(module, gating)
    if not _computes(module, weights):
        return False
    module.gate_up_proj.data, module.down_proj.data = weights.gate_up, weights.down
    if weights.gate_up_bias is not None:
        module.gate_up_proj_bias.data = weights.gate_up_bias
    module.forward = RoutedExperts(products, weights)
    return True


def _gating_of(module: Any) -> Gating | None:
    """None for a gate of any other kind."""
    candidates = [SILU]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float) and limit > 0:
        candidates.append(Gating(alpha, limit))
    width = module.gate_up_proj.shape[1 if not module.is_transposed else 2]
    drawn = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    # In float32, as the largest products are beyond float16.
    drawn = drawn.to(module.gate_up_proj.device)
    for gating in candidates:
        if all(_gates_so(module, drawn * size, gating) for size in _GATE_SIZES):
            return gating
    return None


def _gates_so(module: Any, gate_up: torch.Tensor, gating: Gating) -> bool:
    ours = gated(_gate_over_up(gate_up, module.is_concatenated), gating)
    return _is_near(ours, module._apply_gate(gate_up))


def _gate_over_up(last: torch.Tensor, is_concatenated: bool) -> torch.Tensor:
    """(..., 2 * width) in either order -> gate over up."""
    if is_concatenated:
        return last
    return torch.cat((last[..., ::2], last[..., 1::2]), dim=-1)


def _laid_out(module: Any, gating: Gating) -> RoutedWeights:
    """Contiguous; the parameters themselves where they lie as they should."""
    gate_up, down = module.gate_up_proj.data, module.down_proj.data
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not module.is_concatenated:
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    biases: list[torch.Tensor | None] = [None, None]
    if module.has_bias:
        gate_up_bias = _gate_over_up(module.gate_up_proj_bias.data, module.is_concatenated)
        biases = [gate_up_bias.contiguous(), module.down_proj_bias.data.contiguous()]
    return RoutedWeights(gate_up.contiguous(), down.contiguous(), gating, *biases)


def _computes(module: Any, weights: RoutedWeights) -> bool:
    """Whether the module, as it is, makes of some tokens what the oracle does of weights."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(_NUM_TRIAL_TOKENS, weights.down.shape[1], generator=random)
    hidden = hidden.to(weights.down)
    ids = torch.arange(_NUM_TRIAL_TOKENS * _NUM_TRIAL_CHOICES, device=hidden.device)
    ids = ids.view(_NUM_TRIAL_TOKENS, _NUM_TRIAL_CHOICES) % weights.down.shape[0]
    shares = torch.rand(*ids.shape, generator=random).to(hidden)
    # Of ranks that have a part of each expert: without the hook that adds up what they give.
    wanted = module.forward(hidden, ids, shares)
    return _is_near(routed_in_torch(hidden, ids, shares, weights), wanted)


def _is_near(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return False
    ours, wanted = ours.float(), wanted.float()
    return bool((ours - wanted).norm() <= _MAX_ERROR * wanted.norm())
