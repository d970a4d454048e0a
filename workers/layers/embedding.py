"""The vocabulary cut over tensor-parallel ranks: embedding in, logits out.

The vocabulary is padded to a multiple of the number of ranks; padding rows are zero, no token id
reaches them and their logits are cut off. Knows no sampling.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from workers.layers.formats.format import Cut
from workers.layers.formats.layer import LinearLayer
from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource, copy_slice
from workers.parallel.group import TPGroup


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Rows [first_row, first_row + num_rows) of the padded vocabulary; the real ones come first."""

    first_row: int
    num_rows: int
    num_real_rows: int

    @classmethod
    def of_rank(cls, vocab_size: int, tp: TPGroup) -> "VocabShard":
        num_rows = -(-vocab_size // tp.size)
        first_row = tp.rank * num_rows
        return cls(first_row, num_rows, max(0, min(num_rows, vocab_size - first_row)))


class _VocabParallelWeight(ShardedLayer):
    """weight: (num_rows, hidden_size), this rank's rows of the (vocab_size, hidden_size) matrix."""

    def __init__(self, vocab_size: int, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tp = shard.tp
        self.rows = VocabShard.of_rank(vocab_size, shard.tp)
        self._whole_shape = (vocab_size, hidden_size)
        self.weight = self._empty(shard, self.rows.num_rows, hidden_size)

    def _empty(self, shard: ShardContext, num_rows: int, hidden_size: int) -> nn.Parameter:
        return shard.empty_parameter(num_rows, hidden_size)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": self._whole_shape}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        real = self.rows.num_real_rows
        self.weight[real:].zero_()
        if real:
            first = self.rows.first_row
            copy_slice(self.weight[:real], tensor, slice(first, first + real))

    def shard_as_it_lies(self, name_part: str) -> tuple[nn.Parameter, tuple[slice, ...]] | None:
        rows = self.rows
        if rows.num_real_rows < rows.num_rows:
            return None
        columns = slice(0, self._whole_shape[1])
        return self.weight, (slice(rows.first_row, rows.first_row + rows.num_rows), columns)


class VocabParallelEmbedding(_VocabParallelWeight):
    """Token ids int64 (n,) in [0, vocab_size) -> (n, hidden_size), whole on every rank."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return functional.embedding(input_ids, self.weight)
        local = input_ids - self.rows.first_row
        is_elsewhere = (local < 0) | (local >= self.rows.num_rows)
        hidden = functional.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill(is_elsewhere.unsqueeze(-1), 0))


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """That multiplies by sqrt(hidden_size), rounded to the weight's dtype first (Gemma)."""

    def __init__(self, vocab_size: int, hidden_size: int, shard: ShardContext) -> None:
        super().__init__(vocab_size, hidden_size, shard)
        self.factor = torch.tensor(hidden_size**0.5, dtype=shard.dtype).item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.factor


def vocab_logits(local: torch.Tensor, vocab_size: int, tp: TPGroup) -> torch.Tensor:
    """local (m, num_rows), each rank's logits -> float32 (m, vocab_size)."""
    return tp.all_gather_last_dim(local)[:, :vocab_size].float()


def likeliest_tokens(local: torch.Tensor, rows: VocabShard, tp: TPGroup) -> torch.Tensor:
    """local (m, num_rows), each rank's logits -> int64 (m,), the tokens with the largest ones, the
    first of equals; where there is a NaN, any token.

    Ranks exchange their largest logit and its token, and choose among the same bits: all get the
    same tokens, whatever the states were that their logits are of.
    """
    has_real = rows.num_real_rows > 0
    own = local[:, : rows.num_real_rows] if has_real else torch.full_like(local[:, :1], -math.inf)
    largest, columns = own.max(dim=-1)
    if tp.size == 1:
        return columns
    pair = largest.float().view(torch.int32), (columns + rows.first_row).int()
    found = tp.all_gather_last_dim(torch.stack(pair, dim=-1))
    by_rank = found.view(-1, tp.size, 2)
    # Ranks come in the order of their tokens: equals stay with the first of them.
    winners = by_rank[..., 0].contiguous().view(torch.float32).argmax(dim=-1, keepdim=True)
    return by_rank[..., 1].gather(1, winners).squeeze(1).long()


class ParallelLMHead(_VocabParallelWeight):
    """hidden (m, hidden_size) -> logits float32 (m, vocab_size), whole on every rank."""

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (m, hidden_size) -> logits of this rank's rows, (m, num_rows)."""
        return functional.linear(hidden, self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return vocab_logits(self.local(hidden), self.vocab_size, self.tp)

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (m, hidden_size) -> likeliest_tokens of these logits, int64 (m,)."""
        return likeliest_tokens(self.local(hidden), self.rows, self.tp)


class FormattedLMHead(ParallelLMHead, LinearLayer):
    """ParallelLMHead whose weight may be stored in a format: a drafter's, whose logits change no
    text."""

    def _empty(self, shard: ShardContext, num_rows: int, hidden_size: int) -> nn.Parameter:
        return shard.empty_weight(num_rows, hidden_size)

    def weight_cuts(self) -> Mapping[str, Cut]:
        """Of the real rows: those of padding are not stored."""
        first, columns = self.rows.first_row, slice(0, self._whole_shape[1])
        return {"": Cut(self._whole_shape, slice(first, first + self.rows.num_real_rows), columns)}

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.product(hidden)
        num_padded = self.rows.num_rows - logits.shape[1]
        return functional.pad(logits, (0, num_padded)) if num_padded else logits


class TiedLMHead(nn.Module):
    """ParallelLMHead whose weight is the embedding's. Owns no parameter."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        # In a tuple, lest the embedding's parameter is registered a second time under this module.
        self._embedding = (embedding,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (embedding,) = self._embedding
        local = functional.linear(hidden, embedding.weight)
        return vocab_logits(local, embedding.vocab_size, embedding.tp)
