"""What stands behind a layer's attention, by the layer: dense, or a mixture of experts."""

from typing import Protocol

from torch import nn

from workers.layers.gated_mlp import GatedMLP
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.spec import MixtureSpec
from workers.layers.sharding import ShardContext


class FeedForwardSpec(Protocol):
    """What a family's spec says of it. mixture: None where all layers are dense. dense_layers: of a
    model with mixtures, the layers that have none."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def has_mlp_bias(self) -> bool: ...
    @property
    def mixture(self) -> MixtureSpec | None: ...
    @property
    def dense_layers(self) -> frozenset[int]: ...


def feed_forward(
    spec: FeedForwardSpec, layer_id: int, shard: ShardContext
) -> GatedMLP | MixtureOfExperts:
    """Of one layer: an Mlp."""
    if spec.mixture is None or layer_id in spec.dense_layers:
        return GatedMLP(spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias, shard)
    return MixtureOfExperts(spec.mixture, spec.hidden_size, shard)


def experts_obstacle(model: nn.Module) -> str:
    """As CausalLM.capture_obstacle, of a model's mixtures."""
    experts = (module for module in model.modules() if isinstance(module, Experts))
    if any(module.asks_host for module in experts):
        return "experts of these weights run one after another, as the host sees them chosen"
    return ""
