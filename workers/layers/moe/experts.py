"""The experts of a layer as one layer: a rank's share of all of them in two 3-D tensors.

Experts that all tokens share are cut into pieces of a routed expert's width and lie behind the
others. Knows no routing.
"""

from collections.abc import Mapping

import torch
from torch import nn

from workers.layers.moe.products import experts_in_torch, products_for
from workers.layers.moe.router import block_prefix
from workers.layers.moe.routing import Choice
from workers.layers.moe.spec import MixtureSpec
from workers.layers.moe.tensors import (
    ExpertTensors,
    GatedTargets,
    SeparateExperts,
    StackedExperts,
)
from workers.layers.routed_experts import RoutedWeights
from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource
from workers.parallel.expert_group import ExpertShare


class Experts(ShardedLayer):
    """(n, hidden_size) and Choice -> this rank's part of the sum (n, hidden_size).

    gate_up: (kept, 2 * columns, hidden_size), gate over up; down: (kept, hidden_size, columns);
    biases: (kept, 2 * columns), (kept, hidden_size) or None; kept, columns: of share.
    """

    def __init__(self, spec: MixtureSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self.spec, self._hidden_size = spec, hidden_size
        self.share = share = ExpertShare.of_rank(
            shard.experts, spec.num_experts, spec.num_pieces, spec.width
        )
        kept, columns = share.num_kept, share.num_columns
        self.gate_up = shard.empty_parameter(kept, 2 * columns, hidden_size)
        self.down = shard.empty_parameter(kept, hidden_size, columns)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if spec.has_bias:
            self.gate_up_bias = shard.empty_parameter(kept, 2 * columns)
            self.down_bias = shard.empty_parameter(kept, hidden_size)
        self._products = products_for(shard.dtype, shard.device, self.num_elsewhere == 0)
        self.places = nn.Buffer(_places(spec, share).to(shard.device), persistent=False)

    @property
    def num_elsewhere(self) -> int:
        """1 where an id stands for the experts of other ranks: see local."""
        return int(self.share.num_kept < self.spec.num_experts + self.spec.num_pieces)

    @property
    def asks_host(self) -> bool:
        """Whether forward waits for the device."""
        return self._products is experts_in_torch

    @property
    def weights(self) -> RoutedWeights:
        """The parameters as they are now."""
        return RoutedWeights(
            self.gate_up, self.down, self.spec.gating, self.gate_up_bias, self.down_bias
        )

    def checkpoint_prefix(self, module_path: str) -> str:
        return block_prefix(self.spec, module_path)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self._routed().shapes())
        if self.spec.shared is not None:
            columns, hidden = self.spec.num_pieces * self.spec.width, self._hidden_size
            name = self.spec.shared.name
            shapes[f"{name}.gate_proj.weight"] = (columns, hidden)
            shapes[f"{name}.up_proj.weight"] = (columns, hidden)
            shapes[f"{name}.down_proj.weight"] = (hidden, columns)
        return shapes

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        if name_part.startswith("experts."):
            self._routed().load(name_part, tensor)
        else:
            self._load_shared(name_part.split(".")[1].removesuffix("_proj"), tensor)

    def _routed(self) -> ExpertTensors:
        kind = StackedExperts if self.spec.names.is_stacked else SeparateExperts
        tensors: ExpertTensors = kind(self.spec, self.share, self.weights, self._hidden_size)
        return tensors

    def _load_shared(self, part: str, tensor: TensorSource) -> None:
        share = self.share
        for place, piece in enumerate(share.pieces, start=share.num_own):
            first = piece * self.spec.width + share.first_column
            columns = slice(first, first + share.num_columns)
            GatedTargets(self.weights, self._hidden_size, columns).load(place, part, tensor)

    def local(self, chosen: Choice) -> Choice:
        """The same with the places of experts here; what lies elsewhere is at num_kept."""
        if self.num_elsewhere == 0:
            return chosen
        return chosen._replace(ids=self.places[chosen.ids])

    def forward(self, x: torch.Tensor, chosen: Choice) -> torch.Tensor:
        here = self.local(chosen)
        return self._products(x, here.ids, here.weights, self.weights)


def _places(spec: MixtureSpec, share: ExpertShare) -> torch.Tensor:
    """int64 (num_experts + num_pieces,): where each lies on this rank, num_kept for elsewhere."""
    places = [share.place_of(expert) for expert in range(spec.num_experts + spec.num_pieces)]
    return torch.tensor([share.num_kept if place is None else place for place in places])
