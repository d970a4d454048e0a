"""The router of a mixture of experts, whole on every rank. Knows no expert's weights."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from workers.layers.moe.routing import Choice
from workers.layers.moe.spec import MixtureSpec
from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource, copy_slice


def block_prefix(spec: MixtureSpec, module_path: str) -> str:
    """What precedes names within the block, for a layer at module_path, which is in the block."""
    layer, _, _ = module_path.rpartition(".")[0].rpartition(".")
    return f"{layer}.{spec.names.block}." if layer else f"{spec.names.block}."


class ExpertRouter(ShardedLayer):
    """(n, hidden_size) -> Choice of n tokens: routed experts, then the pieces of shared ones, which
    are counted from num_experts on. Products are those of float32 weights."""

    def __init__(self, spec: MixtureSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self._spec = spec
        self.weight = shard.empty_parameter(spec.num_experts, hidden_size)
        self.bias = shard.empty_parameter(spec.num_experts) if spec.has_router_bias else None
        is_weighed = spec.shared is not None and spec.shared.gate_name is not None
        self.shared_gate = shard.empty_parameter(1, hidden_size) if is_weighed else None
        correction = torch.zeros(spec.num_experts, dtype=torch.float32, device=shard.device)
        self.correction = nn.Buffer(correction) if spec.routing.has_correction else None
        pieces = torch.arange(spec.num_experts, spec.num_experts + spec.num_pieces)
        self.pieces = nn.Buffer(pieces.to(shard.device), persistent=False)

    def checkpoint_prefix(self, module_path: str) -> str:
        return block_prefix(self._spec, module_path)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(target.shape) for name, target in self._targets().items()}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        target = self._targets()[name_part]
        copy_slice(target, tensor, slice(0, target.shape[0]))

    def _targets(self) -> dict[str, torch.Tensor]:
        router, shared = self._spec.names.router, self._spec.shared
        targets: dict[str, torch.Tensor] = {f"{router}.weight": self.weight}
        if self.bias is not None:
            targets[f"{router}.bias"] = self.bias
        if self.correction is not None:
            targets[f"{router}.e_score_correction_bias"] = self.correction
        if shared is not None and self.shared_gate is not None:
            targets[f"{shared.gate_name}.weight"] = self.shared_gate
        return targets

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (n, num_experts)."""
        logits = exact_product(x, self.weight)
        return logits if self.bias is None else logits + self.bias

    def piece_weights(self, x: torch.Tensor) -> torch.Tensor:
        """Of the pieces of shared experts, float32 (n, num_pieces)."""
        num_pieces = self._spec.num_pieces
        if self.shared_gate is None:
            return x.new_ones((x.shape[0], num_pieces), dtype=torch.float32)
        return torch.sigmoid(exact_product(x, self.shared_gate)).expand(-1, num_pieces)

    def forward(self, x: torch.Tensor) -> Choice:
        chosen = self._spec.routing(self.logits(x), self.correction)
        if self._spec.shared is None:
            return chosen
        pieces = self.pieces.expand(x.shape[0], -1)
        return Choice(
            torch.cat((chosen.weights, self.piece_weights(x)), dim=-1),
            torch.cat((chosen.ids, pieces), dim=-1),
        )


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32: products of 16-bit numbers are exact in it."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
