"""GEMMs of deterministic mode: a row has the same bits, whatever the number of rows.

How a product is added up is settled once for weights of one shape: in how many parts, each from its
first column on. fixed.py's kernel says what that gives. For each number of tokens the first of the
GEMMs known to be fast is taken that gives the same bits on this device, which is tried when a model
starts; where none does, the kernel itself. Nothing is timed here. Knows shapes, no layer names.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from workers.layers.gate import Gate
from workers.layers.gemm.build import Activate, Activated, GemmBuilder, LtGemm, Multiply, lt_configs
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import (
    MAX_TILED_TOKENS,
    Choices,
    Config,
    GemmConfig,
    GemmShape,
    LtConfig,
)
from workers.layers.gemm.cublaslt import CublasLtError, CublasLtUnavailableError
from workers.layers.gemm.fixed import BLOCK_K, FixedGemm
from workers.layers.new_tensor import NewTensor

logger = logging.getLogger(__name__)

Gemm = TypeVar("Gemm", Multiply, Activate)

_FEW_TOKENS = 64
_MAX_TRIED_TOKENS = 4096
_MIN_RESULTS = 1 << 18
_MAX_LT_CONFIGS = 6
_TILE_ROWS = 64
_MIN_TILES = 96
"""Of the few tokens' kernels: fewer leave too much of a large GPU idle."""
_SKINNY = ((64, 128, 6, 4), (64, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 8), (64, 64, 2, 4))
_GATED = ((64, 128, 3, 4), (64, 64, 4, 4), (64, 64, 4, 8), (64, 64, 2, 4))
_TILED = ((128, 64, 4, 8), (128, 64, 3, 8), (64, 64, 5, 4))
_GATED_TILED = ((64, 64, 4, 8), (64, 64, 3, 8))


def num_parts(shape: GemmShape) -> int:
    """In how many parts products of such weights are added up: two where their reader can join
    them and the rows alone make few tiles."""
    is_short = -(-shape.out_features // _TILE_ROWS) < _MIN_TILES
    is_even = shape.in_features % (2 * BLOCK_K) == 0
    return 2 if shape.role == "split" and is_short and is_even else 1


def likely_configs(shape: GemmShape, bucket: int) -> Iterator[GemmConfig]:
    """Triton kernels for up to bucket tokens, in num_parts, the likeliest to be fast first. Which
    of them fit a device is not asked."""
    parts = num_parts(shape)
    if shape.role == "gated":
        yield from (GemmConfig("gated", r, k, 1, s, w) for r, k, s, w in _GATED)
        yield from (GemmConfig("gated_tiled", r, k, 1, s, w) for r, k, s, w in _GATED_TILED)
    yield from (GemmConfig("skinny", r, k, parts, s, w) for r, k, s, w in _SKINNY)
    yield from (GemmConfig("tiled", r, k, parts, s, w) for r, k, s, w in _TILED)


@dataclass(frozen=True, slots=True)
class _LtOr:
    """An algorithm of cuBLASLt's where it serves the number of tokens; the library's own choice,
    which LtGemm would take elsewhere, is another order."""

    lt: LtGemm
    otherwise: Multiply

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
    ) -> torch.Tensor:
        gemm = self.lt if self.lt.serves(x.shape[0]) else self.otherwise
        return gemm(x, weight, new)


class InvariantGemmChooser(GemmChooser):
    """Choices whose bits agree, of what is known to be fast for a GPU and of likely others."""

    def gemms(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Multiply]:
        weight, builder = weights[0], self._builder(weights[0].device)
        fixed = FixedGemm(num_parts(shape))

        def build(config: Config) -> Multiply:
            return _built(builder, config, weight, fixed)

        return self._by_tokens(shape, weight, fixed, build)

    def gated_gemms(
        self, shape: GemmShape, weights: Sequence[torch.Tensor], gate: Gate
    ) -> dict[int, Activate]:
        weight, builder = weights[0], self._builder(weights[0].device)
        fixed = FixedGemm(num_parts(shape))

        def build(config: Config) -> Activate:
            if isinstance(config, GemmConfig) and config.is_gated:
                return builder.activate(config, weight, gate)
            return Activated(_built(builder, config, weight, fixed), gate)

        return self._by_tokens(shape, weight, Activated(fixed, gate), build)

    def measure_next(self) -> bool:
        """Nothing: what a like GPU is known to be fast with is taken as it is."""
        return False

    def _by_tokens(
        self,
        shape: GemmShape,
        weight: torch.Tensor,
        fixed: Gemm,
        build: Callable[[Config], Gemm],
    ) -> dict[int, Gemm]:
        builder, key = self._builder(weight.device), str(shape)
        known = self._usable(self._guessed.get(key, {}), shape, builder)
        known |= self._usable(self.known.get(key, {}), shape, builder)
        chosen: dict[int, Gemm] = {}
        least = 1
        for bucket in shape.buckets:
            tried = _Tried(weight, fixed, least, bucket)
            configs = self._candidates(shape, known, weight, bucket)
            served = (one for one in configs if self._serves(one, weight, (least, bucket)))
            chosen[bucket] = tried.first_alike(served, build)
            least = bucket + 1
        # What computes the most tokens that were tried does so tile after tile: more are no other.
        return chosen | {sys.maxsize: chosen[max(chosen)]}

    def _candidates(
        self, shape: GemmShape, known: Choices, weight: torch.Tensor, bucket: int
    ) -> Iterator[Config]:
        """Those in num_parts that the device can compute, the likeliest to be fast first."""
        parts, limits = num_parts(shape), self._limits
        config = known.get(bucket)
        if config is not None and config.num_splits == parts:
            yield config
        if bucket > _FEW_TOKENS:
            yield from self._lt_configs(shape, weight, bucket)
        for likely in likely_configs(shape, bucket):
            # A tile takes a part of the tokens: beyond so many it runs as it does with them.
            num_tokens = min(bucket, MAX_TILED_TOKENS) if likely.is_tiled else bucket
            if likely.fits(num_tokens, shape.in_features, limits):
                yield likely

    def _lt_configs(
        self, shape: GemmShape, weight: torch.Tensor, bucket: int
    ) -> Iterator[LtConfig]:
        x = weight[:1].expand(bucket, -1)
        try:
            library = self._builder(weight.device).library
            yield from lt_configs(library, x, weight, num_parts(shape), _MAX_LT_CONFIGS)
        except (CublasLtError, CublasLtUnavailableError) as error:
            logger.info("gemm %s, %d tokens: no cuBLASLt: %s", shape, bucket, error)

    def _serves(self, config: Config, weight: torch.Tensor, numbers: tuple[int, int]) -> bool:
        """Whether the config itself computes these numbers of tokens, the fewest and the most."""
        if not isinstance(config, LtConfig):
            return True
        gemm = LtGemm(self._builder(weight.device).library, config, weight)
        return all(map(gemm.serves, numbers))


def _built(
    builder: GemmBuilder, config: Config, weight: torch.Tensor, otherwise: Multiply
) -> Multiply:
    gemm = builder.multiply(config, weight)
    return _LtOr(gemm, otherwise) if isinstance(gemm, LtGemm) else gemm


@dataclass(frozen=True, slots=True)
class _Tried(Generic[Gemm]):
    """Numbers of tokens from least to most, with what must come out for some of them."""

    weight: torch.Tensor
    fixed: Gemm
    least: int
    most: int

    def first_alike(self, configs: Iterator[Config], build: Callable[[Config], Gemm]) -> Gemm:
        """The first GEMM with fixed's bits, or fixed."""
        for config in configs:
            try:
                gemm = build(config)
                if all(self._is_alike(gemm, num_tokens) for num_tokens in self._num_tokens()):
                    logger.info("gemm %s, to %d tokens: %s", self._name(), self.most, config)
                    return gemm
            except (CublasLtError, OutOfResources) as error:
                logger.info("gemm %s, %d tokens: %s: %s", self._name(), self.most, config, error)
        logger.info("gemm %s, to %d tokens: the fixed kernel", self._name(), self.most)
        return self.fixed

    def _num_tokens(self) -> set[int]:
        """Some odd number among them: a last tile may be added up by other blocks than the rest."""
        most = min(self.most, max(self.least, _MAX_TRIED_TOKENS))
        return {self.least, (self.least + most) // 2 | 1, most}

    def _is_alike(self, gemm: Gemm, num_tokens: int) -> bool:
        """Another order of short sums shows in one of some ten thousand results."""
        weight, shape = self.weight, (num_tokens, self.weight.shape[1])
        is_unlike = torch.zeros((), dtype=torch.bool, device=weight.device)
        for _ in range(-(-_MIN_RESULTS // (num_tokens * weight.shape[0]))):
            x = torch.randn(shape, dtype=weight.dtype, device=weight.device)
            is_unlike |= (gemm(x, weight) != self.fixed(x, weight)).any()
        return not is_unlike.item()

    def _name(self) -> str:
        return "{}x{}".format(*self.weight.shape)
