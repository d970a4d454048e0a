"""What the Triton decode kernels are compiled for and how a step is cut. Launches nothing.

Numbers only: no tensor, no device and no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

_MIN_TILE = 16  # of a tensor-core product
_WIDE_HEAD_DIM = 128
_MIN_STAGES = 2
_ELEMENT_BYTES = 2
_RESERVED_BYTES = 3 << 10  # of shared memory: the driver's own and a compiler's sums
_FEWEST_ROWS = 4
_FEW_ROWS = 32
_WIDE_GROUP = 4
_MAX_JOINED_CHUNKS = 32
_FUSED_HEAD_DIMS = (64, 128, 256)
_MAX_FUSED_GROUP = 16
_MAX_WAVES = 3
_CUTS_THAT_FILL = 3


class DecodeShape(NamedTuple):
    """What a decode kernel is compiled for. group: query heads a KV head. tile_*: padded to what
    the hardware multiplies. partial_size: float32 elements of a chunk's partial result.
    is_dependent: the kernel starts while its predecessor ends."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    has_window: bool
    has_cap: bool
    has_sinks: bool
    block_keys: int
    has_whole_blocks: bool
    tile_rows: int
    tile_group: int
    tile_dim: int
    block_chunks: int
    partial_size: int
    is_dependent: bool


class FrontShape(NamedTuple):
    """What the fused front of a decode kernel is compiled for. num_splits: of the QKV projection.
    prefetch_keys: how many of a chunk's keys are asked for before the projection is there.
    loads_early: whether the chunk's first block is even loaded by then."""

    num_splits: int
    has_bias: bool
    has_norm: bool
    prefetch_keys: int
    loads_early: bool


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How a kernel runs, measured rather than derived.

    block_keys: keys a program holds at once. chunks_per_multiprocessor: programs that a step is cut
    into, at most. min_chunk_tokens: never cut smaller. slack_eighths: how far a row may exceed a
    whole number of even chunks before it gets one more. joined_elements: float32 elements of
    chunks' values that are joined at once; they are in registers. prefetch_keys, loads_early: as
    FrontShape. fuses_projection: whether the fused front is faster than a rotation kernel before
    attention.
    """

    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    chunks_per_multiprocessor: int = 4
    min_chunk_tokens: int = 128
    slack_eighths: int = 4
    joined_elements: int = 4096
    prefetch_keys: int = 128
    loads_early: bool = False
    fuses_projection: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGeometry:
    """Heads of one rank, head_dim elements for K and V alike, in pages of page_size tokens."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def can_fuse_projection(self) -> bool:
        """Whether the fused front covers these heads."""
        return self.head_dim in _FUSED_HEAD_DIMS and self.group <= _MAX_FUSED_GROUP

    @property
    def num_q_heads(self) -> int:
        return self.kv_heads * self.group

    def shape(
        self,
        tuning: DecodeTuning,
        has_window: bool,
        has_cap: bool,
        has_sinks: bool,
        is_dependent: bool,
    ) -> DecodeShape:
        """The kernel for layers with or without a window, a logit cap and sinks."""
        block_keys = tuning.block_keys
        tile_group = next_power_of_2(self.group)
        tile_dim = max(_MIN_TILE, next_power_of_2(self.head_dim))
        return DecodeShape(
            kv_heads=self.kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            page_size=self.page_size,
            has_window=has_window,
            has_cap=has_cap,
            has_sinks=has_sinks,
            block_keys=block_keys,
            has_whole_blocks=self.page_size % block_keys == 0,
            tile_rows=max(_MIN_TILE, tile_group),
            tile_group=tile_group,
            tile_dim=tile_dim,
            block_chunks=max(
                1, min(_MAX_JOINED_CHUNKS, tuning.joined_elements // (tile_group * tile_dim))
            ),
            partial_size=self.group * (self.head_dim + 2),
            is_dependent=is_dependent,
        )


def measured_tuning(geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
    """The constants for a step of that many rows; benchmarks/h200/decode_sweep.py measures them.

    Few rows: programs are small and as many as run at once, their first keys are loaded while the
    projection is still computed. Of very few rows with many queries a KV head they are larger, and
    whoever joins a row's chunks reads them all at one go. Many rows: the memory is busy anyway; a
    fused front would only sum the projection's splits once more for every chunk.
    """
    block_keys = 64 if geometry.head_dim <= _WIDE_HEAD_DIM else 32
    if num_rows <= _FEWEST_ROWS and geometry.group >= _WIDE_GROUP:
        return DecodeTuning(
            block_keys=block_keys,
            chunks_per_multiprocessor=2,
            min_chunk_tokens=64,
            joined_elements=16384,
            loads_early=True,
            fuses_projection=True,
        )
    if num_rows <= _FEW_ROWS:
        return DecodeTuning(
            block_keys=block_keys,
            num_warps=2,
            chunks_per_multiprocessor=3,
            joined_elements=16384 if num_rows <= _FEWEST_ROWS else 4096,
            loads_early=True,
            fuses_projection=True,
        )
    return DecodeTuning(
        block_keys=block_keys,
        num_stages=4,
    )


def fitting_tuning(geometry: DecodeGeometry, num_rows: int, shared_bytes: int) -> DecodeTuning:
    """measured_tuning with fewer blocks on their way at once, and smaller ones, where a program has
    no more than shared_bytes of shared memory."""
    tuning = measured_tuning(geometry, num_rows)
    while decode_shared_bytes(geometry, tuning) > shared_bytes:
        if tuning.num_stages > _MIN_STAGES:
            tuning = replace(tuning, num_stages=tuning.num_stages - 1)
        elif tuning.block_keys > _MIN_TILE:
            tuning = replace(tuning, block_keys=tuning.block_keys // 2)
        else:
            raise ValueError(f"no tiles of heads of {geometry.head_dim} fit {shared_bytes} bytes")
    return tuning


def decode_shared_bytes(geometry: DecodeGeometry, tuning: DecodeTuning) -> int:
    """At most what a compiled program takes: blocks of K and V on their way, its queries and a
    block's weights."""
    shape = geometry.shape(tuning, True, True, True, True)
    # A block leaves its place when its own turn begins.
    num_blocks = max(1, tuning.num_stages - 1)
    blocks = num_blocks * tuning.block_keys * 2 * shape.tile_dim
    own = shape.tile_rows * (shape.tile_dim + tuning.block_keys)
    return (blocks + own) * _ELEMENT_BYTES + _RESERVED_BYTES


def most_waves(num_rows: int, target_chunks: int) -> int:
    """How many chunks a place may attend to one behind the other, of rows that may be too long for
    one each. Fewer rows are cut often enough to fill the places evenly; of about as many rows as
    places or more, one chunk each does."""
    is_between = target_chunks // _CUTS_THAT_FILL < num_rows <= target_chunks * 7 // 8
    return _MAX_WAVES if is_between else 1


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
