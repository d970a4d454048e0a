"""Greedy tokens where every rank has the logits of a part of the vocabulary.

Ranks exchange the largest logit of each block and its token instead of all logits, by a collective
or, where there is peer memory, by reading them where the others left them. All ranks get the same
tokens. Knows no graph and no model.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.graphs.decode_step import DecodeStepKernels, StepRing, StepRows, TokenRows
from workers.layers.cuda.greedy import (
    Maxima,
    TritonStepKernels,
    block_argmax,
    end_step,
    num_vocab_blocks,
)
from workers.layers.cuda.launch import next_power_of_2
from workers.layers.cuda.meeting import (
    FLAG_BYTES,
    FLAGS_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    TIMEOUT_NS,
    meet,
)
from workers.layers.embedding import VocabShard
from workers.parallel.group import TPGroup
from workers.parallel.peer_memory import PeerArena

_ROUNDING_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CollectiveStepKernels:
    """TritonStepKernels whose blocks come together by an all-gather."""

    alone: TritonStepKernels
    tp: TPGroup
    shard: VocabShard

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        self.alone.begin(ring, rows)

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        self.alone.gather_rows(tokens, named, rows)

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        self.alone.mark_ancestors(parents, num_tokens, cells)

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        size = logits.shape[0], num_vocab_blocks(self.shard.num_rows)
        block_max = torch.empty(size, dtype=torch.float32, device=logits.device)
        block_token = torch.empty(size, dtype=torch.int32, device=logits.device)
        block_argmax(
            logits, self.shard.num_real_rows, self.shard.first_row, (block_max, block_token)
        )
        maxima = self.tp.all_gather_last_dim(block_max), self.tp.all_gather_last_dim(block_token)
        end_step(maxima, slots, self.alone.last_token_ids, ring)


def _peer_end_step(  # noqa: PLR0913
    addresses: tl.tensor,
    maxima: tl.tuple,
    tokens: tl.tuple,
    slots: tl.tensor,
    last_token_ids: tl.tensor,
    ring_sampled: tl.tensor,
    next_slot: tl.tensor,
    current: tl.tensor,
    flags_offset: tl.tensor,
    timeout_ns: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    slot_stride: tl.tensor,
    num_ring_slots: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    NUM_RANKS: tl.constexpr,  # noqa: N803
    BLOCK_RANKS: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    FLAG: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A row at a time: its token to the host's memory, -1 if there was a NaN, and to its slot."""
    ranks = tl.arange(0, BLOCK_RANKS)
    bases = tl.load(addresses + ranks, mask=ranks < NUM_RANKS, other=0)
    own = tl.load(addresses + RANK)
    meet(bases, own, flags_offset, timeout_ns, RANK, NUM_RANKS, BLOCK_RANKS, ROW_BYTES, FLAG)
    ring_slot = tl.load(current)
    sampled = ring_sampled + ring_slot * slot_stride
    blocks = tl.arange(0, BLOCK)
    is_block = blocks < num_blocks
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        largest = float("-inf")
        token = 2147483647
        has_nan = False
        for rank in tl.static_range(NUM_RANKS):
            at = row * num_blocks + blocks
            values = tl.load(
                maxima[rank] + at, mask=is_block, other=float("-inf"), cache_modifier=".cg"
            )
            found = tl.load(
                tokens[rank] + at, mask=is_block, other=2147483647, cache_modifier=".cg"
            )
            has_nan = has_nan | (tl.min(found, axis=0) < 0)
            best = tl.max(values, axis=0)
            first = tl.min(tl.where(values == best, found, 2147483647), axis=0)
            # Ranks come in the order of their tokens: equals stay with the first of them.
            token = tl.where((best > largest) | (rank == 0), first, token)
            largest = tl.maximum(largest, best)
        tl.store(sampled + row, tl.where(has_nan, -1, token))
        if row == 0:
            tl.store(sampled + slot_stride - 1, tl.load(current + 1))
            tl.store(next_slot, (ring_slot + 1) % num_ring_slots)
        slot = tl.load(slots + row)
        tl.store(last_token_ids + slot, tl.where(has_nan, 0, token).to(tl.int64))


_peer_end_step_kernel = triton.jit(
    _peer_end_step, do_not_specialize=("num_rows", "num_blocks", "timeout_ns")
)


class PeerStepKernels:
    """TritonStepKernels that read the other ranks' blocks in peer memory.

    Between two steps all ranks must meet elsewhere. Takes peer_bytes of the arena.
    """

    def __init__(
        self, alone: TritonStepKernels, arena: PeerArena, shard: VocabShard, max_rows: int
    ) -> None:
        memory = arena.memory
        self._alone = alone
        self._shard = shard
        self._rank = memory.rank
        self._addresses = memory.addresses
        self._num_blocks = num_vocab_blocks(shard.num_rows)
        self._flags_offset = arena.take(FLAGS_BYTES)
        num_bytes = max_rows * self._num_blocks * torch.float32.itemsize
        at = arena.take(num_bytes)
        self._maxima = tuple(b[at : at + num_bytes].view(torch.float32) for b in memory.buffers)
        at = arena.take(num_bytes)
        self._tokens = tuple(b[at : at + num_bytes].view(torch.int32) for b in memory.buffers)

    @staticmethod
    def peer_bytes(shard: VocabShard, max_rows: int) -> int:
        one = max_rows * num_vocab_blocks(shard.num_rows) * torch.float32.itemsize
        return FLAGS_BYTES + 2 * one + _ROUNDING_BYTES

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        self._alone.begin(ring, rows)

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        self._alone.gather_rows(tokens, named, rows)

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        self._alone.mark_ancestors(parents, num_tokens, cells)

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        num_rows = logits.shape[0]
        block_argmax(
            logits, self._shard.num_real_rows, self._shard.first_row, self._own_maxima(num_rows)
        )
        _peer_end_step_kernel[(min(num_rows, MAX_PROGRAMS),)](
            self._addresses,
            self._maxima,
            self._tokens,
            slots,
            self._alone.last_token_ids,
            ring.sampled,
            ring.next_slot,
            ring.current,
            self._flags_offset,
            TIMEOUT_NS,
            num_rows,
            self._num_blocks,
            ring.sampled.stride(0),
            ring.num_slots,
            RANK=self._rank,
            NUM_RANKS=len(self._maxima),
            BLOCK_RANKS=next_power_of_2(len(self._maxima)),
            ROW_BYTES=MAX_RANKS * FLAG_BYTES,
            FLAG=FLAG_BYTES,
            BLOCK=next_power_of_2(self._num_blocks),
            num_warps=1,
        )

    def _own_maxima(self, num_rows: int) -> Maxima:
        size, end = (num_rows, self._num_blocks), num_rows * self._num_blocks
        own = self._maxima[self._rank][:end], self._tokens[self._rank][:end]
        return own[0].view(size), own[1].view(size)


def step_kernels(
    tables: tuple[torch.Tensor, ...],
    last_token_ids: torch.Tensor,
    tp: TPGroup,
    shard: VocabShard | None,
    max_rows: int,
) -> DecodeStepKernels:
    """For steps of up to max_rows rows. tables: of requests, by account. shard: of this rank's
    logits, None where it has all.

    A collective of the group, where there is a shard.
    """
    alone = TritonStepKernels(tables, last_token_ids)
    if shard is None:
        return alone
    memory = tp.share_memory(PeerStepKernels.peer_bytes(shard, max_rows))
    if memory is None:
        return CollectiveStepKernels(alone, tp, shard)
    return PeerStepKernels(alone, PeerArena(memory), shard, max_rows)
