"""A linear layer that every rank holds whole: its output is small and all ranks need all of it."""

from collections.abc import Mapping

import torch

from workers.layers.formats.format import Cut
from workers.layers.formats.layer import LinearLayer
from workers.layers.sharding import ShardContext, TensorSource, copy_slice


class ReplicatedLinear(LinearLayer):
    """y = x W^T + b. x (n, in_features) -> (n, out_features), the same on every rank."""

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, shard: ShardContext
    ) -> None:
        super().__init__()
        self.weight = shard.empty_weight(out_features, in_features)
        self.bias = shard.empty_parameter(out_features) if has_bias else None

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def weight_cuts(self) -> Mapping[str, Cut]:
        out_features, in_features = self.weight.shape
        return {"": Cut((out_features, in_features), slice(0, out_features), slice(0, in_features))}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        parameter = self.get_parameter(name_part)
        copy_slice(parameter, tensor, slice(0, parameter.shape[0]))

    def shard_as_it_lies(self, name_part: str) -> tuple[torch.nn.Parameter, tuple[slice, ...]]:
        parameter = self.get_parameter(name_part)
        return parameter, tuple(slice(0, size) for size in parameter.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)
