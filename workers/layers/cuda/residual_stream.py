"""How a layer's output joins the residual stream: alone, over a collective, over peer memory.

A way is chosen once for a model, or by the number of tokens; all ranks of a group choose alike.
Knows no layer.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from workers.errors import ConfigError
from workers.layers.cuda.embedding import lookup
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.cuda.peer_norm import PeerNorm
from workers.layers.cuda.row_shards import StreamLimits
from workers.layers.cuda.two_shot_norm import TwoShotNorm
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.norm import RMSNorm
from workers.parallel.group import TPGroup
from workers.parallel.peer_memory import PeerArena


class Join(Protocol):
    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        """residual += gemm(x), summed over ranks, in place -> its RMSNorm (n, hidden_size), valid
        up to the next join. residual: as begin or select_rows made it."""


class Begin(Protocol):
    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 (n,) -> the stream's beginning and its RMSNorm, both (n, hidden_size).

        Of the stream this rank may have only some rows: joins and select_rows know which.
        """


class SelectRows(Protocol):
    def __call__(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows int64 (m,) of the stream begun last -> (m, hidden_size), all there on every rank:
        a stream that any join may go on with. residual: the stream."""


@dataclass(frozen=True, slots=True)
class StreamWays:
    """By place in the model. Neighbouring places must not be one and the same PeerNorm."""

    begin: Begin
    after_attention: Join
    after_mlp: Join
    select_rows: SelectRows


@dataclass(frozen=True, slots=True)
class _LookUp:
    embedding: VocabParallelEmbedding

    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.embedding(input_ids)
        return residual, rms_norm(residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _LocalJoin:
    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        return add_rms_norm_(gemm(x), residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _CollectiveJoin:
    tp: TPGroup

    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        return add_rms_norm_(self.tp.all_reduce(gemm(x)), residual, norm.weight, norm.eps)


class PeerSums(Protocol):
    """Sums over peer memory of up to max_tokens rows: PeerNorm, TwoShotNorm."""

    max_tokens: int

    def new(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's partial sums, to be written before the next call."""

    def begin_stream(
        self, num_tokens: int, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What all ranks wrote -> the stream and its RMSNorm."""

    def add_norm_(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += what all ranks wrote, in place; returns the new stream's RMSNorm."""


@dataclass(frozen=True, slots=True)
class _PeerLookUp:
    """otherwise: for more tokens than peers take."""

    embedding: VocabParallelEmbedding
    peers: PeerSums
    otherwise: Begin

    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = input_ids.shape[0]
        if num_tokens > self.peers.max_tokens:
            return self.otherwise(input_ids, norm)
        weight = self.embedding.weight
        size = (num_tokens, weight.shape[1])
        own = self.peers.new(size, dtype=weight.dtype, device=weight.device)
        lookup(input_ids, weight, self.embedding.rows.first_row, own)
        return self.peers.begin_stream(num_tokens, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _PeerJoin:
    """otherwise: for more tokens than peers take."""

    peers: PeerSums
    otherwise: Join

    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        if x.shape[0] > self.peers.max_tokens:
            return self.otherwise(gemm, x, residual, norm)
        gemm.into(self.peers.new, x)
        return self.peers.add_norm_(residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _WholeRows:
    """Of a stream that every rank keeps whole."""

    def __call__(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return residual.index_select(0, rows)


@dataclass(frozen=True, slots=True)
class _ShardedRows:
    """Of a stream that the ranks share, or not, as its number of tokens says."""

    peers: TwoShotNorm
    limits: StreamLimits

    def __call__(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        num_tokens = residual.shape[0]
        if not self.limits.is_sharded(num_tokens):
            return residual.index_select(0, rows)
        return self.peers.read_rows(rows, num_tokens)


class _NoWayForAsMany:
    """For more tokens than peers take, where a collective would add up in another order."""

    def begin(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        raise self._refused(input_ids)

    def join(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        raise self._refused(x)

    def _refused(self, rows: torch.Tensor) -> ConfigError:
        return ConfigError(
            f"deterministic: ranks cannot join {len(rows)} tokens of a step over peer memory; "
            "lower max_step_tokens"
        )


def stream_ways(tp: TPGroup, embedding: VocabParallelEmbedding) -> StreamWays:
    """The ways of a group's ranks, for the stream that begins with embedding.

    A collective of the group: allocates peer memory where there is any.
    """
    begin, join = _LookUp(embedding), _CollectiveJoin(tp)
    collective = StreamWays(begin, join, join, _WholeRows())
    if tp.size == 1:
        return replace(collective, after_attention=_LocalJoin(), after_mlp=_LocalJoin())
    return _peer_ways(tp, embedding, collective) or collective


def invariant_stream_ways(tp: TPGroup, embedding: VocabParallelEmbedding) -> StreamWays:
    """As stream_ways, of which a row's sums do not depend on the number of rows: over peer memory,
    which adds up in the order of the ranks, or by a collective of two ranks, whose sums have no
    order. ConfigError where neither is there, and from ways for more tokens than peers take.
    """
    if tp.size == 1:
        return stream_ways(tp, embedding)
    none = _NoWayForAsMany()
    ways = _peer_ways(tp, embedding, StreamWays(none.begin, none.join, none.join, _WholeRows()))
    if ways is None and tp.size == 2:
        join = _CollectiveJoin(tp)
        return StreamWays(_LookUp(embedding), join, join, _WholeRows())
    if ways is None:
        raise ConfigError(
            f"deterministic: {tp.size} ranks have no peer memory, and collectives of more than two "
            "add up in an order that depends on the step; set tp_size to 1 or 2, or leave "
            "deterministic out"
        )
    return ways


def _peer_ways(
    tp: TPGroup, embedding: VocabParallelEmbedding, otherwise: StreamWays
) -> StreamWays | None:
    """Over peer memory as far as it reaches. None where there is none."""
    hidden_size, dtype = embedding.weight.shape[1], embedding.weight.dtype
    limits = StreamLimits.of_ranks(tp.size, hidden_size * dtype.itemsize)
    num_bytes = 3 * PeerNorm.num_bytes(limits.one_shot_tokens, hidden_size, dtype)
    if limits.has_two_shot:
        num_bytes += TwoShotNorm.num_bytes(limits.two_shot_tokens, hidden_size, dtype)
    memory = tp.share_memory(num_bytes)
    if memory is None:
        return None
    arena, ways = PeerArena(memory), otherwise
    if limits.has_two_shot:
        peers = TwoShotNorm(arena, limits.two_shot_tokens, hidden_size, dtype)
        ways = _two_shot_or(ways, embedding, peers, limits)
    first, attention, mlp = (
        PeerNorm(arena, limits.one_shot_tokens, hidden_size, dtype) for _ in range(3)
    )
    return StreamWays(
        _PeerLookUp(embedding, first, ways.begin),
        _PeerJoin(attention, ways.after_attention),
        _PeerJoin(mlp, ways.after_mlp),
        ways.select_rows,
    )


def _two_shot_or(
    otherwise: StreamWays,
    embedding: VocabParallelEmbedding,
    peers: TwoShotNorm,
    limits: StreamLimits,
) -> StreamWays:
    """One place serves all joins: see two_shot_norm."""
    return StreamWays(
        _PeerLookUp(embedding, peers, otherwise.begin),
        _PeerJoin(peers, otherwise.after_attention),
        _PeerJoin(peers, otherwise.after_mlp),
        _ShardedRows(peers, limits),
    )
