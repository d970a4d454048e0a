"""A mixture of experts on one GPU: routed and shared experts in one pair of grouped products.

Experts that all tokens share are cut into pieces of a routed expert's width and join the others,
taken by every token with weight 1: silu(gate) * up goes column by column, and so does the sum over
the inner dimension. Needs Triton.
"""

from collections.abc import Mapping

import torch
from torch import nn

from workers.layers.cuda.expert_gemm import (
    ExpertTiles,
    activate_experts,
    project_experts,
)
from workers.layers.cuda.expert_routing import group
from workers.layers.cuda.expert_tiles import tiles_for
from workers.layers.cuda.routers import router_of
from workers.layers.experts_spec import ExpertsSpec
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource, copy_slice

CORRECTION = "gate.e_score_correction_bias"


class FusedExperts(ShardedLayer):
    """(n, hidden_size) -> partial sums (num_chosen + num_shared, n, hidden_size).

    gate_up: (experts, 2 * width, hidden_size), gate over up; down: (experts, hidden_size, width);
    shared experts come last. router_weight: (num_routed, hidden_size).
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self.spec, self._hidden_size = spec, hidden_size
        num_experts = spec.num_routed + spec.num_shared
        self.gate_up = shard.empty_parameter(num_experts, 2 * spec.width, hidden_size)
        self.down = shard.empty_parameter(num_experts, hidden_size, spec.width)
        self.router_weight = shard.empty_parameter(spec.num_routed, hidden_size)
        correction = None
        if spec.routing == "grouped_sigmoid":
            correction = torch.zeros(spec.num_routed, dtype=torch.float32, device=shard.device)
        self.correction = None if correction is None else nn.Buffer(correction)
        self._router = router_of(spec, self.correction)
        self._shared_bytes = DeviceLimits.of(shard.device).shared_bytes

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {name: tuple(target.shape) for name, target in self._routed_targets().items()}
        shapes["gate.weight"] = tuple(self.router_weight.shape)
        if self.correction is not None:
            shapes[CORRECTION] = tuple(self.correction.shape)
        if self.spec.num_shared:
            rows = self.spec.num_shared * self.spec.width
            shapes["shared_experts.gate_proj.weight"] = (rows, self._hidden_size)
            shapes["shared_experts.up_proj.weight"] = (rows, self._hidden_size)
            shapes["shared_experts.down_proj.weight"] = (self._hidden_size, rows)
        return shapes

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        if name_part.startswith("shared_experts."):
            self._load_shared(name_part, tensor)
            return
        target = self._target(name_part)
        copy_slice(target, tensor, slice(0, target.shape[0]))

    def _target(self, name_part: str) -> torch.Tensor:
        if name_part == "gate.weight":
            return self.router_weight
        if name_part == CORRECTION and self.correction is not None:
            return self.correction
        return self._routed_targets()[name_part]

    def _routed_targets(self) -> dict[str, torch.Tensor]:
        targets: dict[str, torch.Tensor] = {}
        for expert in range(self.spec.num_routed):
            gate, up = self.gate_up[expert].chunk(2)
            targets[f"experts.{expert}.gate_proj.weight"] = gate
            targets[f"experts.{expert}.up_proj.weight"] = up
            targets[f"experts.{expert}.down_proj.weight"] = self.down[expert]
        return targets

    def _load_shared(self, name_part: str, tensor: TensorSource) -> None:
        width = self.spec.width
        for piece in range(self.spec.num_shared):
            expert, part = self.spec.num_routed + piece, slice(piece * width, (piece + 1) * width)
            gate, up = self.gate_up[expert].chunk(2)
            if name_part == "shared_experts.down_proj.weight":
                copy_slice(self.down[expert], tensor, slice(0, self._hidden_size), part)
            else:
                copy_slice(gate if "gate_proj" in name_part else up, tensor, part)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: contiguous."""
        # Products of 16-bit inputs are exact in float32: routed as if the weights were float32.
        logits = torch.mm(hidden, self.router_weight.t(), out_dtype=torch.float32)
        chosen = self._router(logits)
        tiles = self._tiles(chosen.ids.numel())
        grouped = group(chosen, tiles[0].block_rows)
        num_chosen = chosen.ids.shape[1]
        activated = activate_experts(hidden, self.gate_up, grouped, num_chosen, tiles[0])
        return project_experts(activated, self.down, chosen.weights, grouped, tiles[1])

    def _tiles(self, num_pairs: int) -> tuple[ExpertTiles, ExpertTiles]:
        return tiles_for(num_pairs, self.gate_up.shape[0], self._shared_bytes)
