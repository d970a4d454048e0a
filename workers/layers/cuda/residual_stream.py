"""How a layer's output joins the residual stream: alone, over a collective, over peer memory.

A way is chosen once for a model; all ranks of a group choose alike. Knows no layer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.layers.cuda.embedding import lookup
from workers.layers.cuda.linear import PartialGemm
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.cuda.peer_norm import PeerNorm
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.norm import RMSNorm
from workers.parallel.group import TPGroup
from workers.parallel.peer_memory import PeerArena

_MAX_PEER_BYTES = {2: 64 << 20}
_MAX_PEER_BYTES_OF_MORE_RANKS = 2 << 20
"""Of one sum, by ranks: with two, reading the other's is all that any way has to move; with more,
a collective moves less."""


class Join(Protocol):
    def __call__(
        self, gemm: PartialGemm, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        """residual (n, hidden_size) += gemm(x), summed over ranks, in place -> its RMSNorm."""


class Begin(Protocol):
    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 (n,) -> the stream's beginning (n, hidden_size) and its RMSNorm."""


@dataclass(frozen=True, slots=True)
class StreamWays:
    """By place in the model. Neighbouring places must not be one and the same peer memory."""

    begin: Begin
    after_attention: Join
    after_mlp: Join


@dataclass(frozen=True, slots=True)
class _LookUp:
    embedding: VocabParallelEmbedding

    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.embedding(input_ids)
        return residual, rms_norm(residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _LocalJoin:
    def __call__(
        self, gemm: PartialGemm, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        return add_rms_norm_(gemm(x), residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _CollectiveJoin:
    tp: TPGroup

    def __call__(
        self, gemm: PartialGemm, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        return add_rms_norm_(self.tp.all_reduce(gemm(x)), residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _PeerLookUp:
    """otherwise: for more tokens than peer memory holds."""

    embedding: VocabParallelEmbedding
    peers: PeerNorm
    otherwise: Begin

    def __call__(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = input_ids.shape[0]
        if num_tokens > self.peers.max_tokens:
            return self.otherwise(input_ids, norm)
        weight = self.embedding.weight
        size = (num_tokens, weight.shape[1])
        own = self.peers.new(size, dtype=weight.dtype, device=weight.device)
        lookup(input_ids, weight, self.embedding.rows.first_row, own)
        residual = torch.empty(size, dtype=weight.dtype, device=weight.device)
        return residual, self.peers.begin_stream(residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class _PeerJoin:
    """otherwise: for more tokens than peer memory holds."""

    peers: PeerNorm
    otherwise: Join

    def __call__(
        self, gemm: PartialGemm, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        if x.shape[0] > self.peers.max_tokens:
            return self.otherwise(gemm, x, residual, norm)
        gemm.into(self.peers.new, x)
        return self.peers.add_norm_(residual, norm.weight, norm.eps)


def stream_ways(tp: TPGroup, embedding: VocabParallelEmbedding) -> StreamWays:
    """The ways of a group's ranks, for the stream that begins with embedding.

    A collective of the group: allocates peer memory where there is any.
    """
    look_up = _LookUp(embedding)
    if tp.size == 1:
        return StreamWays(look_up, _LocalJoin(), _LocalJoin())
    join = _CollectiveJoin(tp)
    hidden_size, dtype = embedding.weight.shape[1], embedding.weight.dtype
    max_bytes = _MAX_PEER_BYTES.get(tp.size, _MAX_PEER_BYTES_OF_MORE_RANKS)
    max_tokens = max(1, max_bytes // (hidden_size * dtype.itemsize))
    memory = tp.share_memory(3 * PeerNorm.num_bytes(max_tokens, hidden_size, dtype))
    if memory is None:
        return StreamWays(look_up, join, join)
    arena = PeerArena(memory)
    begin, attention, mlp = (PeerNorm(arena, max_tokens, hidden_size, dtype) for _ in range(3))
    return StreamWays(
        _PeerLookUp(embedding, begin, look_up), _PeerJoin(attention, join), _PeerJoin(mlp, join)
    )
