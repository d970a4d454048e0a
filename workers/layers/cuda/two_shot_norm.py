"""The sum of all ranks' partial products, the residual addition and RMSNorm, rows shared by ranks.

A rank sums up and keeps only its own rows of the residual stream and writes their norms to all
ranks: over NVLink go the parts of its rows and their norms, however many ranks there are, and the
stream itself never does. Every row is computed as in peer_norm: the bits are the same.

One call of the kernel is two meetings of the ranks, at two places. Program p of a rank comes to the
first when all that its stream ran before has ended, so that then
- all parts are written (they may be read),
- all readers of the last call's norms are done, on all ranks (norms may be written), and
- all readers of the stream's rows that were launched before are done (rows may be written).
It comes to the second when it has read its parts and written its rows and norms. A rank's kernel
ends when all its programs have met at the second, so that then
- no rank reads this rank's parts any more (the next GEMM may write them),
- all rows of the norms are here, and all ranks' rows of the stream can be read.
Hence one memory of each kind and one pair of meeting places serve a whole model, whatever the
number of tokens from call to call, provided that all ranks make the same calls in the same order on
one stream, and that nobody reads norms after the next call. Knows no layer and no process group.
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
from workers.layers.cuda.peer_norm import add_parts, norm_row, row_registers, row_warps
from workers.layers.cuda.row_shards import RowShards
from workers.parallel.peer_memory import PeerArena

_ROUNDING_BYTES = 1024


def _two_shot_add_norm(  # noqa: PLR0913
    addresses: tl.tensor,
    parts: tl.tuple,
    hidden: tl.tuple,
    residual: tl.tensor,
    weight: tl.tensor,
    flags_offset: tl.tensor,
    timeout_ns: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
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
    """A row at a time of those from first_row up to end_row.

    All ranks start as many programs, those without a row included: they only meet.
    """
    columns = tl.arange(0, BLOCK)
    is_real = columns < hidden_size
    scale = tl.load(weight + columns, mask=is_real, other=0.0).to(tl.float32)
    ranks = tl.arange(0, BLOCK_RANKS)
    bases = tl.load(addresses + ranks, mask=ranks < NUM_RANKS, other=0)
    own = tl.load(addresses + RANK)
    begin_dependent(IS_DEPENDENT)
    meet(bases, own, flags_offset, timeout_ns, RANK, NUM_RANKS, BLOCK_RANKS, ROW_BYTES, FLAG)
    for row in range(first_row + tl.program_id(0), end_row, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * hidden_size + columns
        if BEGINS_STREAM:
            stream = tl.zeros((BLOCK,), dtype=tl.float32)
        else:
            stream = tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
        stream = add_parts(stream, parts, at, is_real, RANK, NUM_RANKS)
        rounded = stream.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=is_real)
        normed = norm_row(rounded, scale, hidden_size, eps)
        for turn in tl.static_range(NUM_RANKS):
            # Each rank begins with another one, so that no link has all writes at once.
            tl.store(hidden[(RANK + 1 + turn) % NUM_RANKS] + at, normed, mask=is_real)
    tl.debug_barrier()
    end = flags_offset + PLACE_BYTES
    meet(bases, own, end, timeout_ns, RANK, NUM_RANKS, BLOCK_RANKS, ROW_BYTES, FLAG)


_two_shot_add_norm_kernel = triton.jit(
    _two_shot_add_norm, do_not_specialize=("first_row", "end_row", "timeout_ns")
)


def _read_rows(
    addresses: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    residual_offset: tl.tensor,
    rows_a_rank: tl.tensor,
    hidden_size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One row a program, from the rank that keeps it."""
    columns = tl.arange(0, BLOCK)
    is_real = columns < hidden_size
    place = tl.program_id(0).to(tl.int64)
    begin_dependent(IS_DEPENDENT)
    row = tl.load(rows + place)
    base = tl.load(addresses + row // rows_a_rank) + residual_offset
    # Parts of an arena begin at multiples of more than that.
    kept = tl.multiple_of(base.to(tl.pointer_type(out.dtype.element_ty)), 16)
    values = tl.load(
        kept + row * hidden_size + columns, mask=is_real, other=0.0, cache_modifier=".cg"
    )
    tl.store(out + place * hidden_size + columns, values, mask=is_real)


_read_rows_kernel = triton.jit(_read_rows, do_not_specialize=("rows_a_rank", "residual_offset"))


class TwoShotNorm:
    """Where ranks join their partial sums of up to max_tokens rows, at every place of a model.

    Takes num_bytes of the arena. timeout_ns: for tests.
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
        self.shards = RowShards(memory.rank, memory.size)
        self._addresses = memory.addresses
        self._timeout_ns = timeout_ns
        self._flags_offset = arena.take(2 * FLAGS_BYTES)

        num_bytes = max_tokens * hidden_size * dtype.itemsize

        def of_all_ranks(offset: int) -> tuple[torch.Tensor, ...]:
            rows = (buffer[offset : offset + num_bytes] for buffer in memory.buffers)
            return tuple(one.view(dtype).view(max_tokens, hidden_size) for one in rows)

        self._parts = of_all_ranks(arena.take(num_bytes))
        self._hidden = of_all_ranks(arena.take(num_bytes))
        self._residual_offset = arena.take(num_bytes)
        self._residual = of_all_ranks(self._residual_offset)[memory.rank]

    @staticmethod
    def num_bytes(max_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
        """How much of an arena one takes at most."""
        return 2 * FLAGS_BYTES + 3 * max_tokens * hidden_size * dtype.itemsize + _ROUNDING_BYTES

    def new(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's partial sums, to be written before the next call: (..., hidden_size)."""
        own = self._parts[self.shards.rank]
        if dtype != own.dtype or device != own.device:
            raise ValueError(f"partial sums are {own.dtype} on {own.device}, not {dtype}, {device}")
        return own.view(-1)[: torch.Size(size).numel()].view(size)

    def begin_stream(
        self, num_tokens: int, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What all ranks wrote -> the stream and its RMSNorm, both (num_tokens, hidden_size).

        Of the stream this rank has its own rows only; read_rows has all. The norm is whole and
        valid up to the next call.
        """
        residual = self._residual[:num_tokens]
        return residual, self._launch(residual, weight, eps, True)

    def add_norm_(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += what all ranks wrote, in place, in this rank's rows, which alone are read.

        Returns the new stream's RMSNorm, whole, valid up to the next call.
        """
        return self._launch(residual, weight, eps, False)

    def read_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Rows int64 (m,) of the stream of num_tokens begun last -> (m, hidden_size), whole.

        Reads other ranks' without meeting them: they wrote them before the last call ended, and
        write them again in a later call only, after a meeting.
        """
        hidden_size = self._residual.shape[1]
        out = self._residual.new_empty((rows.shape[0], hidden_size))
        if rows.shape[0] == 0:
            return out
        is_dependent = dependent_launch(out)
        block = next_power_of_2(hidden_size)
        _read_rows_kernel[(rows.shape[0],)](
            self._addresses,
            rows,
            out,
            self._residual_offset,
            self.shards.rows_a_rank(num_tokens),
            hidden_size,
            BLOCK=block,
            IS_DEPENDENT=is_dependent,
            num_warps=row_warps(block),
            launch_pdl=is_dependent,
        )
        return out

    def _launch(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float, begins_stream: bool
    ) -> torch.Tensor:
        shards, (num_tokens, hidden_size) = self.shards, residual.shape
        own_rows = shards.own(num_tokens)
        block = next_power_of_2(hidden_size)
        is_dependent = dependent_launch(residual)
        num_programs = min(shards.rows_a_rank(num_tokens), MAX_PROGRAMS)
        _two_shot_add_norm_kernel[(num_programs,)](
            self._addresses,
            self._parts,
            self._hidden,
            residual,
            weight,
            self._flags_offset,
            self._timeout_ns,
            own_rows.start,
            own_rows.stop,
            hidden_size,
            eps,
            RANK=shards.rank,
            NUM_RANKS=shards.size,
            BLOCK_RANKS=next_power_of_2(shards.size),
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
        return self._hidden[shards.rank][:num_tokens]
