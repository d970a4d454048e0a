"""A mixture of experts as a layer's feed-forward block."""

import torch
from torch import nn

from workers.layers.moe.experts import Experts
from workers.layers.moe.router import ExpertRouter
from workers.layers.moe.spec import MixtureSpec
from workers.layers.sharding import ShardContext


class MixtureOfExperts(nn.Module):
    """An Mlp. Every rank routes all tokens; its experts' part is summed over the ranks."""

    def __init__(self, spec: MixtureSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self._tp = shard.tp
        self.router = ExpertRouter(spec, hidden_size, shard)
        self.experts = Experts(spec, hidden_size, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.experts(x, self.router(x))
        return self._tp.all_reduce(part)
