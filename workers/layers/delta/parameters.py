"""Parameters of a gated delta rule that belong to heads, cut by heads."""

from collections.abc import Mapping

import torch

from workers.layers.delta.heads import DeltaHeads
from workers.layers.sharding import (
    FusedLayer,
    ShardContext,
    ShardedLayer,
    TensorSource,
    copy_slice,
)


class ConvolutionTaps(ShardedLayer):
    """weight: (channels, taps) of this rank's queries, keys and values; the checkpoint has
    (channels, 1, taps) of all."""

    def __init__(self, heads: DeltaHeads, shard: ShardContext) -> None:
        super().__init__()
        self._heads, self._own = heads, heads.of_rank(shard.tp.size)
        self._rank = shard.tp.rank
        self.weight = shard.empty_parameter(self._own.channels, heads.taps)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self._heads.channels, 1, self._heads.taps)}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        whole, own = self._heads, self._own
        begin, target = 0, 0
        for all_rows, rows in zip(
            (whole.keys, whole.keys, whole.values), (own.keys, own.keys, own.values), strict=True
        ):
            first = begin + self._rank * rows
            piece = self.weight[target : target + rows].unsqueeze(1)
            copy_slice(piece, tensor, slice(first, first + rows))
            begin, target = begin + all_rows, target + rows


class DecayParameters(FusedLayer):
    """A_log and dt_bias, (value_heads,) each, of this rank's heads."""

    def __init__(self, heads: DeltaHeads, shard: ShardContext) -> None:
        super().__init__()
        self._num_heads = heads.value_heads
        own = heads.of_rank(shard.tp.size).value_heads
        self._rows = slice(shard.tp.rank * own, (shard.tp.rank + 1) * own)
        self.A_log = shard.empty_parameter(own)
        self.dt_bias = shard.empty_parameter(own)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"A_log": (self._num_heads,), "dt_bias": (self._num_heads,)}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        copy_slice(self.get_parameter(name_part), tensor, self._rows)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """a: (n, value_heads) -> float32, log of what a token keeps of the state, <= 0."""
        steps = torch.nn.functional.softplus(a.float() + self.dt_bias)
        return -self.A_log.float().exp() * steps
