"""What multiplies by some weights, from the config that was chosen. Makes no choice."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from workers.layers.cuda.activation import gate_and_mul
from workers.layers.gate import Gate
from workers.layers.gemm.configs import Config, GemmConfig, LtConfig, Role
from workers.layers.gemm.cublaslt import Algorithm, CublasLt, Layouts, Product, load_library
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.gemm.skinny import triton_gated_gemm, triton_gemm
from workers.layers.gemm.tiled import triton_gated_tiled_gemm, triton_tiled_gemm
from workers.layers.new_tensor import NewTensor

logger = logging.getLogger(__name__)

_MAX_PREPARED = 64
"""Numbers of tokens for which a GEMM of cuBLASLt keeps its descriptors."""

Activate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x (n, in_features), gated weight (out_features, in_features) -> its gate's function of
the gate's half, times the other half (n, out_features / 2)."""


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
TritonGatedGemm = Callable[[torch.Tensor, torch.Tensor, GemmConfig, Gate], torch.Tensor]
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
    gate: Gate

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.gemm(x, weight, self.config, self.gate)


def product_of(x: torch.Tensor, weight: torch.Tensor, num_splits: int) -> Product:
    """Partial products of several splits are float32, that of one has x's dtype."""
    out_features, in_features = weight.shape
    out_dtype = x.dtype if num_splits == 1 else torch.float32
    return Product(x.shape[0], out_features, in_features, num_splits, x.dtype, out_dtype)


class LtGemm:
    """x (n, in_features), weight (out_features, in_features) -> (splits, n, out_features).

    For weights of one shape and dtype, like which weight is. Numbers of tokens that the algorithm
    cannot serve get the library's own first choice, and a line in the log.
    """

    def __init__(self, library: CublasLt, config: LtConfig, weight: torch.Tensor) -> None:
        self._library = library
        self._algorithm = Algorithm(bytes.fromhex(config.algorithm))
        self._product = product_of(weight[:1], weight, config.num_splits)
        self._prepared = lru_cache(maxsize=_MAX_PREPARED)(self._prepare)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
    ) -> torch.Tensor:
        layouts, algorithm = self._prepared(x.shape[0])
        product = layouts.product
        size = (product.num_splits, product.num_tokens, product.out_features)
        out = new(size, dtype=product.out_dtype, device=x.device)
        self._library.multiply(layouts, algorithm, (x, weight, out))
        return out

    def serves(self, num_tokens: int) -> bool:
        """Whether the algorithm does; else the library's own first choice would."""
        return self._prepared(num_tokens)[1] is self._algorithm

    def _prepare(self, num_tokens: int) -> tuple[Layouts, Algorithm]:
        layouts = self._library.layouts(replace(self._product, num_tokens=num_tokens))
        if self._library.supports(layouts, self._algorithm):
            return layouts, self._algorithm
        logger.info("cuBLASLt: the chosen algorithm does not serve %s", layouts.product)
        return layouts, self._library.algorithms(layouts, 1)[0]


def lt_configs(
    library: CublasLt, x: torch.Tensor, weight: torch.Tensor, num_splits: int, max_configs: int
) -> list[LtConfig]:
    """What the library holds for the fastest for this product, best first."""
    layouts = library.layouts(product_of(x, weight, num_splits))
    return [
        LtConfig(library.version, num_splits, algorithm.encoded.hex())
        for algorithm in library.algorithms(layouts, max_configs)
    ]


@dataclass(frozen=True, slots=True)
class Activated:
    """A product of gated weights, then the activation."""

    multiply: Multiply
    gate: Gate

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(self.multiply(x, weight), x.dtype, self.gate)


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
        """For all weights of this one's shape and dtype. Gates are SiLU: any takes as long."""
        if role == "gated":
            return self.activate(config, weight, "silu")
        return self.multiply(config, weight)

    def multiply(self, config: Config, weight: torch.Tensor) -> Multiply:
        if config is None:
            return cublas_gemm
        if isinstance(config, LtConfig):
            return LtGemm(self.library, config, weight)
        return _Configured(TRITON_GEMMS[config.kind], config)

    def activate(self, config: Config, weight: torch.Tensor, gate: Gate) -> Activate:
        """For gated weights."""
        if isinstance(config, GemmConfig) and config.is_gated:
            return _ConfiguredGated(TRITON_GATED_GEMMS[config.kind], config, gate)
        return Activated(self.multiply(config, weight), gate)
