"""The GEMMs worth timing for a shape and a number of tokens, by what other measurements showed."""

from collections.abc import Sequence

from workers.layers.gemm.configs import GemmConfig, GemmShape
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits

_MIN_PROGRAMS = 64
_WIDE_ROWS = 512
_MAX_SPLIT_PROGRAMS = 4096
_GEMV_SHAPES = ((2, 1024, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 8))
_NARROW_GEMV_SHAPES = ((8, 256, 4), (16, 256, 4), (16, 256, 8))
_SKINNY_SHAPES = (
    (64, 128, 4, 4),
    (64, 128, 6, 4),
    (64, 256, 3, 4),
    (128, 64, 4, 4),
    (128, 64, 6, 4),
    (128, 128, 3, 8),
    (128, 128, 5, 8),
    (256, 64, 4, 8),
)
_GATED_GEMV_SHAPES = ((1, 1024, 4), (2, 512, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 8))
_NARROW_GATED_GEMV_SHAPES = ((4, 256, 4), (8, 256, 4), (8, 256, 8))
"""For rows of no multiple of 512 elements (Gemma 3's 3,840), which the others do not fit."""
_GATED_SHAPES = ((64, 64, 4, 4), (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 8))
_SMALL_SKINNY_SHAPES = ((64, 128, 2, 4), (64, 64, 4, 4), (64, 64, 3, 4), (128, 64, 3, 4))
_SMALL_GATED_SHAPES = ((64, 64, 3, 4), (64, 64, 2, 4))
"""For GPUs with less shared memory than Hopper's."""
_SPLITS = (1, 2, 3, 4, 7, 8)

_MANY_TOKENS = 128
_MANY_SKINNY_SHAPES = ((128, 64, 4, 8), (64, 64, 2, 4))
_MANY_GATED_SHAPES = ((64, 64, 4, 8), (64, 64, 3, 8))
_TILED_SHAPES = ((128, 64, 4, 8), (128, 64, 3, 8), (64, 64, 5, 4))
_GATED_TILED_SHAPES = ((64, 64, 4, 8), (64, 64, 3, 8))
_MANY_SPLITS = (1, 2, 4)
_MAX_LT_SPLIT_TOKENS = 512


def candidates(shape: GemmShape, num_tokens: int, limits: DeviceLimits) -> list[GemmConfig]:
    """Triton kernels worth timing for a shape on a device of these limits."""
    is_small = limits.shared_bytes < HOPPER.shared_bytes
    configs = _many(shape) if num_tokens > _MANY_TOKENS else _few(shape, is_small)
    return [
        config
        for config in configs
        if config.fits(num_tokens, shape.in_features, limits) and _fills_a_gpu(shape, config)
    ]


def like(configs: Sequence[GemmConfig], guesses: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Those of one kind and in about as many splits as a guess, the guesses first."""
    kinds = {(guess.kind, splits) for guess in guesses for splits in _beside(guess.num_splits)}
    alike = [config for config in configs if (config.kind, config.num_splits) in kinds]
    return list(dict.fromkeys([guess for guess in guesses if guess in configs] + alike))


def _beside(num_splits: int) -> tuple[int, ...]:
    """From half a number of splits to twice as many."""
    return tuple(n for n in _SPLITS if num_splits <= 2 * n and n <= 2 * num_splits)


def _few(shape: GemmShape, is_small: bool) -> list[GemmConfig]:
    skinny = _SKINNY_SHAPES + (_SMALL_SKINNY_SHAPES if is_small else ())
    gated = _GATED_SHAPES + (_SMALL_GATED_SHAPES if is_small else ())
    configs = []
    is_narrow = shape.in_features % _WIDE_ROWS > 0
    gemv = _NARROW_GEMV_SHAPES if is_narrow else _GEMV_SHAPES
    for splits in (1,) if shape.role == "whole" else _SPLITS:
        configs += [GemmConfig("gemv", r, k, splits, 1, w) for r, k, w in gemv]
        configs += [GemmConfig("skinny", r, k, splits, s, w) for r, k, s, w in skinny]
    if shape.role == "gated":
        gated_gemv = _NARROW_GATED_GEMV_SHAPES if is_narrow else _GATED_GEMV_SHAPES
        configs += [GemmConfig("gated_gemv", r, k, 1, 1, w) for r, k, w in gated_gemv]
        configs += [GemmConfig("gated", r, k, 1, s, w) for r, k, s, w in gated]
    return configs


def _many(shape: GemmShape) -> list[GemmConfig]:
    configs = []
    if shape.role == "gated":
        configs += [GemmConfig("gated_tiled", r, k, 1, s, w) for r, k, s, w in _GATED_TILED_SHAPES]
        configs += [GemmConfig("gated", r, k, 1, s, w) for r, k, s, w in _MANY_GATED_SHAPES]
    for splits in (1,) if shape.role == "whole" else _MANY_SPLITS:
        configs += [GemmConfig("tiled", r, k, splits, s, w) for r, k, s, w in _TILED_SHAPES]
        configs += [GemmConfig("skinny", r, k, splits, s, w) for r, k, s, w in _MANY_SKINNY_SHAPES]
    return configs


def lt_splits(shape: GemmShape, num_tokens: int) -> list[int]:
    """In how many partial products cuBLASLt's algorithms are worth timing."""
    if num_tokens == 1:
        return []
    if shape.role == "whole" or num_tokens > _MAX_LT_SPLIT_TOKENS:
        return [1]
    return [n for n in _MANY_SPLITS if shape.in_features % (n * _MANY_TOKENS) == 0]


def _fills_a_gpu(shape: GemmShape, config: GemmConfig) -> bool:
    """Not too few programs; and no further split where there are plenty."""
    num_programs = -(-shape.out_features // config.block_rows) * config.num_splits
    if config.num_splits > 1 and num_programs > _MAX_SPLIT_PROGRAMS:
        return False
    return num_programs >= _MIN_PROGRAMS
