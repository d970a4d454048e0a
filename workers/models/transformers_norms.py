"""RMSNorms in transformers' own code, as one kernel each where a family's own take ten launches.

A module is taken for an RMSNorm by what it computes, whatever its class is called. Knows no model.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

RMSNormKernel = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(x (n, size), contiguous; scale (size,); eps) -> a new tensor of x's shape and type, computed in
float32. A scale of x's type multiplies what was rounded to it; a wider one what was not."""

_EPS_NAMES = ("variance_epsilon", "eps", "norm_eps")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_TRIAL_SHAPE = (3, 5)
_LEAST = 1e-4
"""What is smaller may differ by as much as a rounding of it."""
_MAX_ROUNDINGS = 4
"""Rounding steps of the type between our result and the module's: two in each, at most."""


@dataclass(frozen=True, slots=True)
class RowsNorm:
    """scale: (size,), of the weight's type or float32."""

    kernel: RMSNormKernel
    scale: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., size) -> its norm, of x's type, lying in memory as x does where that is dense."""
        last = x.dim() - 1
        order = [*sorted(range(last), key=x.stride, reverse=True), last]
        by_address = x.permute(order)
        rows = by_address.reshape(-1, x.shape[-1])
        normed = self.kernel(rows.contiguous(), self.scale, self.eps).view(by_address.shape)
        return normed.permute([order.index(axis) for axis in range(x.dim())])


def rms_norm_in_torch(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """The oracle of every RMSNormKernel."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if scale.dtype == x.dtype:
        normed = normed.to(x.dtype).float()
    return (normed * scale.float()).to(x.dtype)


@torch.inference_mode()
def fuse_norms(body: nn.Module, kernel: RMSNormKernel) -> int:
    """Let the RMSNorms of 16-bit weights within body run as kernel; returns how many they are.

    Their weights are taken as they are now.
    """
    num_fused = 0
    for module in body.modules():
        norm = _norm_of(module, kernel)
        if norm is not None:
            # An attribute of the instance: its parameters stay where they are.
            module.forward = norm
            num_fused += 1
    return num_fused


def _norm_of(module: nn.Module, kernel: RMSNormKernel) -> RowsNorm | None:
    """None for a module that computes anything else."""
    weight, eps = _weight_and_eps(module)
    if weight is None or eps is None:
        return None
    scales = (weight.detach(), weight.float(), 1.0 + weight.float())
    errors = [_error(module, scale, eps) for scale in scales]
    least = min(errors)
    if least > _MAX_ROUNDINGS * torch.finfo(weight.dtype).eps:
        return None
    return RowsNorm(kernel, scales[errors.index(least)], eps)


def _weight_and_eps(module: nn.Module) -> tuple[torch.Tensor | None, float | None]:
    """Of a module that has one weight and takes one tensor."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weight = tensors.get("weight")
    if weight is None or len(tensors) != 1 or weight.dim() != 1:
        return None, None
    if weight.dtype not in _KERNEL_DTYPES or len(inspect.signature(module.forward).parameters) != 1:
        return None, None
    given = (getattr(module, name, None) for name in _EPS_NAMES)
    return weight, next((eps for eps in given if isinstance(eps, float)), None)


def _error(module: nn.Module, scale: torch.Tensor, eps: float) -> float:
    """The largest relative one of the oracle beside the module, infinite where that takes no rows
    or gives another shape or type: of rows whose mean is not zero, and of rows so small that eps
    counts."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(*_TRIAL_SHAPE, scale.shape[0], generator=random) + 0.5
    weight = next(module.parameters())
    largest = 0.0
    for size in (1.0, eps**0.5):
        x = (drawn * size).to(weight)
        ours = rms_norm_in_torch(x, scale, eps)
        try:
            wanted = module(x)
        except Exception:  # noqa: BLE001 - a model's code raises what it likes
            return float("inf")
        if wanted.shape != ours.shape or wanted.dtype != ours.dtype:
            return float("inf")
        errors = (ours.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(_LEAST)
        largest = max(largest, errors.max().item())
    return largest
