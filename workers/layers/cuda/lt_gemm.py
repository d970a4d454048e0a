"""GEMMs by one chosen algorithm of cuBLASLt. Makes no choice."""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from workers.layers.cuda.cublaslt import Algorithm, CublasLt, Layouts, Product
from workers.layers.new_tensor import NewTensor

logger = logging.getLogger(__name__)

_MAX_PREPARED = 64
"""Numbers of tokens for which a GEMM keeps its descriptors."""


@dataclass(frozen=True, slots=True)
class LtConfig:
    """An algorithm of cuBLASLt's, good only for the version of the library that it comes from.

    num_splits: matrices of partial products, as in GemmConfig; what the algorithm splits beyond
    that it adds up itself. algorithm: as hexadecimal digits.
    """

    version: int
    num_splits: int
    algorithm: str

    def __str__(self) -> str:
        return f"cuBLASLt {self.num_splits} {self.algorithm.rstrip('0')}"


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
