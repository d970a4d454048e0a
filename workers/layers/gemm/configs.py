"""What GEMMs there are: shapes of weights, numbers of tokens, and the ways to multiply by them.

Knows a device's limits, not the device: which kernels fit is arithmetic. Runs nothing.
"""

from dataclasses import dataclass
from typing import Literal

from workers.layers.cuda.launch import next_power_of_2
from workers.layers.gemm.device_limits import DeviceLimits

TOKEN_BUCKETS = (1, 16, 32, 64, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""A choice holds for all token counts above the previous bucket, up to its own."""
MAX_SAMPLED_TOKENS = 512
"""More rows than that are not asked of a vocabulary's weights often enough to choose for."""

MAX_TOKENS = 256
MAX_TILED_TOKENS = 512
_MIN_VOCABULARY = 1 << 16
OPERAND_BYTES = 2
_MIN_DOT_TOKENS = 16
_MAX_TILE_TOKENS = 256
_SUM_BYTES = 4
_GEMV_SHARED_BYTES = 8 << 10
_TURNING_BYTES = 17 << 10
"""To turn sums over beside the next tile's operands; elsewhere they take the operands' place."""

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

    @property
    def buckets(self) -> tuple[int, ...]:
        """Those of TOKEN_BUCKETS that are worth measuring."""
        if self.role == "whole" and self.out_features >= _MIN_VOCABULARY:
            return tuple(n for n in TOKEN_BUCKETS if n <= MAX_SAMPLED_TOKENS)
        return TOKEN_BUCKETS


def block_tokens(num_tokens: int) -> int:
    return max(_MIN_DOT_TOKENS, next_power_of_2(num_tokens))


def tile_tokens(num_tokens: int) -> int:
    """Of one tile, where tiles share the tokens out."""
    return min(_MAX_TILE_TOKENS, block_tokens(num_tokens))


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to compute x @ weight.T.

    kind: "gemv" for exactly one token, "skinny" for up to MAX_TOKENS, "tiled" for up to
    MAX_TILED_TOKENS; "gated_gemv", "gated" and "gated_tiled" are these with the activation of a
    gated block. block_rows: output features of a tile, after the activation. block_k, num_splits,
    num_stages, num_warps: as usual; in_features must be a multiple of num_splits * block_k.
    """

    kind: Literal["gemv", "skinny", "tiled", "gated_gemv", "gated", "gated_tiled"]
    block_rows: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int

    @property
    def is_gated(self) -> bool:
        """Whether it leaves activations instead of a product."""
        return self.kind in ("gated_gemv", "gated", "gated_tiled")

    @property
    def is_tiled(self) -> bool:
        """Whether its loads are by tensor maps."""
        return self.kind in ("tiled", "gated_tiled")

    @property
    def is_gemv(self) -> bool:
        return self.kind in ("gemv", "gated_gemv")

    def fits(self, num_tokens: int, in_features: int, limits: DeviceLimits) -> bool:
        """Whether a device of these limits can compute it."""
        if in_features % (self.num_splits * self.block_k):
            return False
        if self.is_gemv:
            return num_tokens == 1
        if self.is_tiled and not limits.has_copy_engine:
            return False
        max_tokens = MAX_TILED_TOKENS if self.is_tiled else MAX_TOKENS
        return num_tokens <= max_tokens and self.shared_bytes(num_tokens) <= limits.shared_bytes

    def shared_bytes(self, num_tokens: int) -> int:
        """The most that a program's tiles take of shared memory, on any generation."""
        if self.is_gemv:
            return _GEMV_SHARED_BYTES
        tokens = tile_tokens(num_tokens) if self.is_tiled else block_tokens(num_tokens)
        rows = self.block_rows * (2 if self.is_gated else 1)
        operands = self.num_stages * (rows + tokens) * self.block_k * OPERAND_BYTES
        if self.is_tiled:
            return operands + _TURNING_BYTES
        return max(operands, rows * tokens * _SUM_BYTES)


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


Config = GemmConfig | LtConfig | None
"""None: cuBLAS by its own choice."""

Choices = dict[int, Config]
"""By bucket."""
