"""A mixture of experts as a layer's feed-forward block."""

import torch
from torch import nn

from workers.layers.moe.experts import Experts
from workers.layers.moe.router import ExpertRouter
from workers.layers.moe.routing import Choice
from workers.layers.moe.spec import MixtureSpec
from workers.layers.sharding import ShardContext


class MixtureOfExperts(nn.Module):
    """An Mlp. Every rank routes all tokens; its experts' part is summed over the ranks.

    tally: int64 (num_experts,), where tokens are counted; None where nobody wants to know.
    """

    def __init__(self, spec: MixtureSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self._tp = shard.tp
        self.router = ExpertRouter(spec, hidden_size, shard)
        self.experts = Experts(spec, hidden_size, shard)
        self.tally: torch.Tensor | None = None

    def choose(self, x: torch.Tensor) -> Choice:
        """As the router's; counted."""
        chosen: Choice = self.router(x)
        self.count(chosen.ids)
        return chosen

    def count(self, ids: torch.Tensor) -> None:
        """ids: (n, k) of any integers, routed experts first."""
        if self.tally is None:
            return
        routed = ids[:, : self.experts.spec.routing.num_chosen].flatten().long()
        self.tally.scatter_add_(0, routed, torch.ones_like(routed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.experts(x, self.choose(x))
        return self._tp.all_reduce(part)
