"""Which GEMM for which weights and how many tokens: by measurement, kept in a file.

Measured choices for some GPUs come with the package; others are measured once, when a model first
starts on a machine, and kept in the user's cache folder. Knows shapes, no layer names.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import torch

from workers.layers.cuda.activation import silu_and_mul
from workers.layers.cuda.gated_gemm import triton_gated_gemm
from workers.layers.cuda.gemm import GemmConfig, triton_gemm
from workers.layers.cuda.gemm_timing import gemm_seconds
from workers.layers.cuda.norm import rms_norm

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, 16, 32, 64, 128)
"""A choice holds for all token counts above the previous bucket, up to its own."""

SHIPPED_FOLDER = Path(__file__).parent / "tuned"
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_NUM_TIMED_WEIGHTS = 6
_MIN_PROGRAMS = 64
_MAX_SPLIT_PROGRAMS = 4096
_GEMV_SHAPES = ((2, 1024, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 8))
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
_GATED_SHAPES = ((64, 64, 4, 4), (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 8))
_SPLITS = (1, 2, 3, 4, 7, 8)
_MIN_GAIN = 0.98
"""A Triton kernel has to be at least this much faster than cuBLAS to be taken."""

Choices = dict[int, GemmConfig | None]


Role = Literal["split", "whole", "gated"]


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Weights (out_features, in_features) and what their product is for.

    split: its reader can sum partial products. whole: it cannot. gated: it is a gate's and an up
    projection's, and what is wanted is the activation.
    """

    out_features: int
    in_features: int
    role: Role

    def __str__(self) -> str:
        return f"{self.out_features}x{self.in_features} {self.role}"


def candidates(shape: GemmShape, num_tokens: int) -> list[GemmConfig]:
    """Triton kernels worth timing for a shape."""
    configs = []
    for num_splits in (1,) if shape.role == "whole" else _SPLITS:
        if num_tokens == 1:
            configs += [GemmConfig("gemv", r, k, num_splits, 1, w) for r, k, w in _GEMV_SHAPES]
        configs += [GemmConfig("skinny", r, k, num_splits, s, w) for r, k, s, w in _SKINNY_SHAPES]
    if shape.role == "gated":
        configs += [GemmConfig("gated_gemv", r, k, 1, 1, w) for r, k, w in _GATED_GEMV_SHAPES]
        configs += [GemmConfig("gated", r, k, 1, s, w) for r, k, s, w in _GATED_SHAPES]
    return [
        config
        for config in configs
        if config.fits(num_tokens, shape.in_features) and _fills_a_gpu(shape, config)
    ]


def _fills_a_gpu(shape: GemmShape, config: GemmConfig) -> bool:
    """Not too few programs; and no further split where there are plenty."""
    num_programs = -(-shape.out_features // config.block_rows) * config.num_splits
    if config.num_splits > 1 and num_programs > _MAX_SPLIT_PROGRAMS:
        return False
    return num_programs >= _MIN_PROGRAMS


def multiply(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None) -> torch.Tensor:
    """Partial products (splits, n, out_features) of x @ weight.T; None: cuBLAS's."""
    if config is None:
        return torch.mm(x, weight.t()).unsqueeze(0)
    return triton_gemm(x, weight, config)


def multiply_gated(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None
) -> torch.Tensor:
    """silu(gate) * up (n, width), of weight's two halves."""
    if config is not None and config.kind in ("gated_gemv", "gated"):
        return triton_gated_gemm(x, weight, config)
    return silu_and_mul(multiply(x, weight, config), x.dtype)


def measure(shape: GemmShape, weights: Sequence[torch.Tensor]) -> Choices:
    """Time every candidate against cuBLAS on weights of one shape, for every bucket.

    Each is timed between its neighbours in a layer, a norm before and a reader of its product
    after it: how far the kernels overlap is part of their worth.
    """
    timed = weights[:_NUM_TIMED_WEIGHTS]
    return {num_tokens: _fastest(shape, timed, num_tokens) for num_tokens in TOKEN_BUCKETS}


def _fastest(
    shape: GemmShape, weights: Sequence[torch.Tensor], num_tokens: int
) -> GemmConfig | None:
    x = torch.randn(num_tokens, shape.in_features, dtype=weights[0].dtype, device=weights[0].device)
    scale = torch.ones_like(x[0])

    def seconds(config: GemmConfig | None) -> float:
        def chain(weight: torch.Tensor) -> torch.Tensor:
            normed = rms_norm(x, scale, 1e-5)
            if shape.role == "gated":
                return multiply_gated(normed, weight, config)
            # Any kernel that reads all partial products will do.
            return silu_and_mul(multiply(normed, weight, config), x.dtype)

        elapsed_s = gemm_seconds(chain, weights)
        logger.debug("gemm %s, %d tokens: %s %.1f us", shape, num_tokens, config, elapsed_s * 1e6)
        return elapsed_s

    cublas_s = seconds(None)
    timings = {config: seconds(config) for config in candidates(shape, num_tokens)}
    best = min(timings, key=timings.__getitem__, default=None)
    if best is None or timings[best] > _MIN_GAIN * cublas_s:
        best, best_s = None, cublas_s
    else:
        best_s = timings[best]
    logger.info(
        "gemm %s, %d tokens: cuBLAS %.1f us, chosen %s %.1f us",
        shape,
        num_tokens,
        cublas_s * 1e6,
        best or "cuBLAS",
        best_s * 1e6,
    )
    return best


class GemmChooser:
    """Choices by shape. shipped, cached: JSON files that may be absent; cached is written to.

    known: by the shape's text. What is cached on this machine goes before what is shipped.
    """

    def __init__(self, shipped: Path, cached: Path) -> None:
        self._cached = cached
        self._measured = _read(cached)
        self.known = _read(shipped) | self._measured

    @classmethod
    def for_device(cls, device: torch.device) -> "GemmChooser":
        """Choices of this GPU model, Triton's and torch's versions apart."""
        name = torch.cuda.get_device_name(device).replace(" ", "_")
        cache = Path.home() / ".cache" / "tessera"
        return cls(SHIPPED_FOLDER / f"{name}.json", cache / f"gemm-{name}-{torch.__version__}.json")

    def choose(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> Choices:
        """weights: all of a model's that have this shape and one dtype, on the device."""
        if weights[0].dtype not in _SIXTEEN_BIT:
            return {}
        key = str(shape)
        if key not in self.known:
            self.known[key] = self._measured[key] = measure(shape, weights)
            self._write()
        return self.known[key]

    def _write(self) -> None:
        self._cached.parent.mkdir(parents=True, exist_ok=True)
        text = dump_choices(self._measured)
        partial = self._cached.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._cached)


def dump_choices(choices: Mapping[str, Choices]) -> str:
    """As JSON: shape -> bucket -> the config's fields in order, or null for cuBLAS."""
    table = {
        shape: {str(n): None if c is None else list(astuple(c)) for n, c in by_tokens.items()}
        for shape, by_tokens in choices.items()
    }
    lines = [f"  {json.dumps(shape)}: {json.dumps(row)}" for shape, row in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _read(path: Path) -> dict[str, Choices]:
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        shape: {int(n): None if c is None else GemmConfig(*c) for n, c in by_tokens.items()}
        for shape, by_tokens in table.items()
    }
