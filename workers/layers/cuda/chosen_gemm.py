"""What multiplies by some weights, from the config that was chosen. Makes no choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from workers.layers.cuda.activation import silu_and_mul
from workers.layers.cuda.cublaslt import CublasLt, load_library
from workers.layers.cuda.gated_gemm import triton_gated_gemm
from workers.layers.cuda.gemm import GemmConfig, triton_gemm
from workers.layers.cuda.gemm_candidates import Role
from workers.layers.cuda.lt_gemm import LtConfig, LtGemm
from workers.layers.cuda.tiled_gemm import triton_gated_tiled_gemm, triton_tiled_gemm

Config = GemmConfig | LtConfig | None
"""None: cuBLAS by its own choice."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x (n, in_features), weight (out_features, in_features) -> the product (splits, n, out_features).

For gated weights -> silu(gate) * up (n, out_features / 2).
"""


def cublas_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t()).unsqueeze(0)


TritonGemm = Callable[[torch.Tensor, torch.Tensor, GemmConfig], torch.Tensor]
TRITON_GEMMS: Mapping[str, TritonGemm] = {
    "gemv": triton_gemm,
    "skinny": triton_gemm,
    "tiled": triton_tiled_gemm,
    "gated_gemv": triton_gated_gemm,
    "gated": triton_gated_gemm,
    "gated_tiled": triton_gated_tiled_gemm,
}
"""By a config's kind."""


@dataclass(frozen=True, slots=True)
class _Configured:
    gemm: TritonGemm
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

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def library(self) -> CublasLt:
        """Raises CublasLtUnavailableError."""
        return CublasLt(self._device, load_library())

    def build(self, config: Config, weight: torch.Tensor, role: Role) -> Multiply:
        """For all weights of this one's shape and dtype."""
        multiply = self._multiply(config, weight)
        is_activated = isinstance(config, GemmConfig) and config.is_gated
        return _Activated(multiply) if role == "gated" and not is_activated else multiply

    def _multiply(self, config: Config, weight: torch.Tensor) -> Multiply:
        if config is None:
            return cublas_gemm
        if isinstance(config, LtConfig):
            return LtGemm(self.library, config, weight)
        return _Configured(TRITON_GEMMS[config.kind], config)
