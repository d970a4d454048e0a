"""The sum of all ranks' partial products, the residual addition and RMSNorm in one kernel.

Every rank reads the partial sums where the others' GEMMs have left them, over NVLink, and adds them
up in float32 in the order of the ranks: all get the same bits. Nothing is copied, one meeting of
the ranks suffices. Knows no layer and no process group.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.cuda.meeting import (
    FLAG_BYTES,
    FLAGS_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    TIMEOUT_NS,
    meet,
)
from workers.parallel.peer_memory import PeerArena

_ELEMENTS_PER_WARP = 256
_MAX_WARPS = 16
_MAX_LONE_PROGRAMS = MAX_PROGRAMS // 2
_LONE_REGISTERS = 128
"""A thread's, of programs that have a multiprocessor each: enough to wait for all parts at once."""


def row_warps(block: int) -> int:
    """How many warps take a row of block elements: the order of a norm's sum depends on it."""
    return min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP))


def row_registers(num_programs: int) -> int | None:
    """The most registers of a thread. None: as few as the compiler likes, so that two programs fit
    on a multiprocessor."""
    return _LONE_REGISTERS if num_programs <= _MAX_LONE_PROGRAMS else None


def _run_add_parts(
    stream: tl.tensor,
    parts: tl.tuple,
    at: tl.tensor,
    is_real: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    NUM_RANKS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """stream, float32, with the parts of all ranks added in the order of the ranks.

    All are asked for before one is added, by each rank in another order, its own first.
    """
    found: tl.tuple = ()
    for turn in tl.static_range(NUM_RANKS):
        # Past the first cache, which may hold what lay there before.
        part = tl.load(
            parts[(RANK + turn) % NUM_RANKS] + at, mask=is_real, other=0.0, cache_modifier=".cg"
        )
        found += (part,)
    for rank in tl.static_range(NUM_RANKS):
        stream += found[(rank + NUM_RANKS - RANK) % NUM_RANKS].to(tl.float32)
    return stream


def _run_norm_row(
    rounded: tl.tensor, scale: tl.tensor, hidden_size: tl.tensor, eps: tl.tensor
) -> tl.tensor:
    """The RMSNorm of one row of the stream, as it is kept, in the stream's dtype."""
    stream = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(stream * stream, axis=0) / hidden_size + eps)
    normed = (stream * inverse_rms).to(rounded.dtype).to(tl.float32)
    return (normed * scale).to(rounded.dtype)


add_parts = triton.jit(_run_add_parts)
norm_row = triton.jit(_run_norm_row)


def _peer_add_norm(  # noqa: PLR0913
    addresses: tl.tensor,
    parts: tl.tuple,
    residual: tl.tensor,
    weight: tl.tensor,
    hidden: tl.tensor,
    flags_offset: tl.tensor,
    timeout_ns: tl.tensor,
    num_tokens: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    NUM_RANKS: tl.constexpr,  # noqa: N803
    BLOCK_RANKS: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    FLAG: tl.constexpr,  # noqa: N803
    PLACE_BYTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    BEGINS_STREAM: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """A row at a time. BEGINS_STREAM: the sum is the stream, the ranks meet once more at the end,
    so that they may come here again without another place in between."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_real = columns < hidden_size
    scale = tl.load(weight + columns, mask=is_real, other=0.0).to(tl.float32)
    ranks = tl.arange(0, BLOCK_RANKS)
    bases = tl.load(addresses + ranks, mask=ranks < NUM_RANKS, other=0)
    own = tl.load(addresses + RANK)
    begin_dependent(IS_DEPENDENT)
    meet(bases, own, flags_offset, timeout_ns, RANK, NUM_RANKS, BLOCK_RANKS, ROW_BYTES, FLAG)
    for row in range(program, num_tokens, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * hidden_size + columns
        if BEGINS_STREAM:
            stream = tl.zeros((BLOCK,), dtype=tl.float32)
        else:
            stream = tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
        stream = add_parts(stream, parts, at, is_real, RANK, NUM_RANKS)
        rounded = stream.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=is_real)
        tl.store(hidden + at, norm_row(rounded, scale, hidden_size, eps), mask=is_real)
    if BEGINS_STREAM:
        tl.debug_barrier()
        again = flags_offset + PLACE_BYTES
        meet(bases, own, again, timeout_ns, RANK, NUM_RANKS, BLOCK_RANKS, ROW_BYTES, FLAG)


_peer_add_norm_kernel = triton.jit(_peer_add_norm, do_not_specialize=("num_tokens", "timeout_ns"))


class PeerNorm:
    """One place where ranks join their partial sums of up to max_tokens rows.

    Between two uses of it every rank uses another one, or begin_stream. Takes 2 * FLAGS_BYTES and
    a row's bytes for each token of the arena. timeout_ns: for tests.
    """

    def __init__(
        self,
        arena: PeerArena,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_ns: int = TIMEOUT_NS,
    ) -> None:
        memory = arena.memory
        if memory.size > MAX_RANKS:
            raise ValueError(f"{memory.size} ranks: at most {MAX_RANKS} can meet")
        self.max_tokens = max_tokens
        self._rank = memory.rank
        self._addresses = memory.addresses
        self._timeout_ns = timeout_ns
        self._flags_offset = arena.take(2 * FLAGS_BYTES)
        num_bytes = max_tokens * hidden_size * dtype.itemsize
        offset = arena.take(num_bytes)
        self._parts = tuple(
            buffer[offset : offset + num_bytes].view(dtype) for buffer in memory.buffers
        )

    @staticmethod
    def num_bytes(max_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
        """How much of an arena one takes at most."""
        return 2 * FLAGS_BYTES + max_tokens * hidden_size * dtype.itemsize + 512

    def new(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's partial sums, to be written before the next call: (..., hidden_size)."""
        own = self._parts[self._rank]
        if dtype != own.dtype or device != own.device:
            raise ValueError(f"partial sums are {own.dtype} on {own.device}, not {dtype}, {device}")
        return own[: torch.Size(size).numel()].view(size)

    def add_norm_(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += what all ranks wrote, in place; returns the RMSNorm of the new residual."""
        return self._launch(residual, weight, eps, False)

    def begin_stream(
        self, num_tokens: int, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What all ranks wrote -> the stream and its RMSNorm, both (num_tokens, hidden_size).

        May be called twice in a row.
        """
        residual = self._parts[self._rank].new_empty((num_tokens, weight.shape[0]))
        return residual, self._launch(residual, weight, eps, True)

    def _launch(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float, begins_stream: bool
    ) -> torch.Tensor:
        num_tokens, hidden_size = residual.shape
        hidden = torch.empty_like(residual)
        block = next_power_of_2(hidden_size)
        is_dependent = dependent_launch(residual)
        num_programs = min(num_tokens, MAX_PROGRAMS)
        _peer_add_norm_kernel[(num_programs,)](
            self._addresses,
            self._parts,
            residual,
            weight,
            hidden,
            self._flags_offset,
            self._timeout_ns,
            num_tokens,
            hidden_size,
            eps,
            RANK=self._rank,
            NUM_RANKS=len(self._parts),
            BLOCK_RANKS=next_power_of_2(len(self._parts)),
            ROW_BYTES=MAX_RANKS * FLAG_BYTES,
            FLAG=FLAG_BYTES,
            PLACE_BYTES=FLAGS_BYTES,
            BLOCK=block,
            BEGINS_STREAM=begins_stream,
            IS_DEPENDENT=is_dependent,
            num_warps=row_warps(block),
            maxnreg=row_registers(num_programs),
            launch_pdl=is_dependent,
        )
        return hidden
