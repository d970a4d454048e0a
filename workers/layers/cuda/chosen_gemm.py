"""What multiplies by some weights, from the config that was chosen. Makes no choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from workers.layers.cuda.activation import silu_and_mul
from workers.layers.cuda.cublaslt import CublasLt, load_library
from workers.layers.cuda.device_limits import DeviceLimits
from workers.layers.cuda.gated_gemm import triton_gated_gemm
from workers.layers.cuda.gemm import GemmConfig, triton_gemm
from workers.layers.cuda.gemm_candidates import Role
from workers.layers.cuda.lt_gemm import LtConfig, LtGemm
from workers.layers.cuda.tiled_gemm import triton_gated_tiled_gemm, triton_tiled_gemm
from workers.layers.new_tensor import NewTensor

Config = GemmConfig | LtConfig | None
"""None: cuBLAS by its own choice."""

Activate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x (n, in_features), gated weight (out_features, in_features) -> silu(gate) * up
(n, out_features / 2)."""


class Multiply(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
    ) -> torch.Tensor:
        """x (n, in_features), weight (out_features, in_features) -> the product
        (splits, n, out_features), in a tensor that new makes."""


def cublas_gemm(
    x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
) -> torch.Tensor:
    out = new((1, x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    torch.mm(x, weight.t(), out=out[0])
    return out


TritonGemm = Callable[[torch.Tensor, torch.Tensor, GemmConfig, NewTensor], torch.Tensor]
TRITON_GEMMS: Mapping[str, TritonGemm] = {
    "gemv": triton_gemm,
    "skinny": triton_gemm,
    "tiled": triton_tiled_gemm,
}
TritonGatedGemm = Callable[[torch.Tensor, torch.Tensor, GemmConfig], torch.Tensor]
TRITON_GATED_GEMMS: Mapping[str, TritonGatedGemm] = {
    "gated_gemv": triton_gated_gemm,
    "gated": triton_gated_gemm,
    "gated_tiled": triton_gated_tiled_gemm,
}
"""Both by a config's kind."""


@dataclass(frozen=True, slots=True)
class _Configured:
    gemm: TritonGemm
    config: GemmConfig

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
    ) -> torch.Tensor:
        return self.gemm(x, weight, self.config, new)


@dataclass(frozen=True, slots=True)
class _ConfiguredGated:
    gemm: TritonGatedGemm
    config: GemmConfig

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.gemm(x, weight, self.config)


@dataclass(frozen=True, slots=True)
class _Activated:
    """A product of gated weights, then the activation."""

    multiply: Multiply

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self.multiply(x, weight), x.dtype)


class GemmBuilder:
    """Makes GEMMs on one device. cuBLASLt is loaded for the first config that needs it."""

    def __init__(self, device: torch.device, limits: DeviceLimits) -> None:
        self._device = device
        self.limits = limits

    @classmethod
    def on(cls, device: torch.device) -> "GemmBuilder":
        return cls(device, DeviceLimits.of(device))

    @cached_property
    def library(self) -> CublasLt:
        """Raises CublasLtUnavailableError."""
        return CublasLt(self._device, load_library())

    def build(self, config: Config, weight: torch.Tensor, role: Role) -> Multiply | Activate:
        """For all weights of this one's shape and dtype."""
        return self.activate(config, weight) if role == "gated" else self.multiply(config, weight)

    def multiply(self, config: Config, weight: torch.Tensor) -> Multiply:
        if config is None:
            return cublas_gemm
        if isinstance(config, LtConfig):
            return LtGemm(self.library, config, weight)
        return _Configured(TRITON_GEMMS[config.kind], config)

    def activate(self, config: Config, weight: torch.Tensor) -> Activate:
        """For gated weights."""
        if isinstance(config, GemmConfig) and config.is_gated:
            return _ConfiguredGated(TRITON_GATED_GEMMS[config.kind], config)
        return _Activated(self.multiply(config, weight))
