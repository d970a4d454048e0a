"""The experts' two products one by one: what each is given, what it should give, its kernels.

Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import Chosen, ExpertBlocks, group
from workers.layers.routed_experts import Gating, RoutedWeights, gated

Product = Literal["activate", "project"]
PRODUCTS: tuple[Product, ...] = ("activate", "project")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model's experts. num_chosen: of a token, shared pieces included."""

    hidden: int
    width: int
    num_chosen: int
    gating: Gating
    has_bias: bool

    @classmethod
    def of(cls, experts: RoutedWeights, num_chosen: int) -> Sizes:
        _, hidden, width = experts.down.shape
        return cls(hidden, width, num_chosen, experts.gating, experts.down_bias is not None)

    def one_expert(self, device: torch.device) -> RoutedWeights:
        new = partial(torch.zeros, dtype=torch.bfloat16, device=device)
        biases = (new(1, 2 * self.width), new(1, self.hidden)) if self.has_bias else ()
        matrices = new(1, 2 * self.width, self.hidden), new(1, self.hidden, self.width)
        return RoutedWeights(*matrices, self.gating, *biases)


def call(
    product: Product,
    tiles: ExpertTiles,
    x: torch.Tensor,
    experts: RoutedWeights,
    grouped: ExpertBlocks,
    shares: torch.Tensor,
) -> torch.Tensor:
    """x: of activate hidden states (n, hidden_size), of project (n * num_chosen, width)."""
    if product == "project":
        return tiles.project(x, experts.down, shares, grouped, experts.down_bias)
    gate_up, bias = experts.gate_up, experts.gate_up_bias
    return tiles.activate(x, gate_up, grouped, shares.shape[1], bias, experts.gating)


def compile_kernel(sizes: Sizes, product: Product, tiles: ExpertTiles) -> None:
    """Leaves it in Triton's cache for other processes. Computes nothing: no block is real."""
    device = torch.device("cuda", 0)
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    blocks = ints(sizes.num_chosen), ints((3, 1)), ints(1)
    grouped = ExpertBlocks(*blocks, tiles.block_rows, ints(0))
    shape = (1, sizes.hidden) if product == "activate" else (sizes.num_chosen, sizes.width)
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    shares = torch.zeros((1, sizes.num_chosen), device=device)
    call(product, tiles, x, sizes.one_expert(device), grouped, shares)


@dataclass(frozen=True, slots=True)
class Case:
    """One step's rows. x: (n, hidden_size); activated (n * num_chosen, width), as activate should
    make it; wanted: both products' results by name, float32."""

    experts: RoutedWeights
    chosen: Chosen
    x: torch.Tensor
    activated: torch.Tensor
    wanted: dict[Product, torch.Tensor]

    @classmethod
    def of(cls, experts: RoutedWeights, chosen: Chosen, x: torch.Tensor) -> Case:
        pairs = group(chosen, 16).pairs.long()
        made = activated_rows(experts, chosen, pairs, x)
        activated = made.to(x.dtype)
        projected = projected_rows(experts, chosen, pairs, activated)
        return cls(experts, chosen, x, activated, {"activate": made, "project": projected})

    def run_of(self, product: Product, tiles: ExpertTiles) -> Callable[[], torch.Tensor]:
        grouped = group(self.chosen, tiles.block_rows)
        x = self.x if product == "activate" else self.activated
        return partial(call, product, tiles, x, self.experts, grouped, self.chosen.weights)

    def error(self, product: Product, made: torch.Tensor) -> float:
        """The largest, as a share of the largest value."""
        wanted = self.wanted[product]
        return float((made.float() - wanted).abs().max() / wanted.abs().max())


def activated_rows(
    experts: RoutedWeights, chosen: Chosen, pairs: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """What activate is to give, by plain torch: float32 (n * num_chosen, width)."""
    parts, bias = [], experts.gate_up_bias
    tokens = (pairs // chosen.ids.shape[1]).split(chosen.counts.tolist())
    for expert, own in enumerate(tokens):
        gate_up = x[own].float() @ experts.gate_up[expert].float().t()
        gate_up += 0.0 if bias is None else bias[expert].float()
        parts.append(gated(gate_up, experts.gating))
    return torch.cat(parts)


def projected_rows(
    experts: RoutedWeights, chosen: Chosen, pairs: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    """What project is to give: float32 (num_chosen, n, hidden_size)."""
    num_tokens, num_chosen = chosen.ids.shape
    parts, bias = [], experts.down_bias
    for expert, rows in enumerate(activated.split(chosen.counts.tolist())):
        made = rows.float() @ experts.down[expert].float().t()
        parts.append(made + (0.0 if bias is None else bias[expert].float()))
    out = torch.empty_like(torch.cat(parts))
    out[pairs] = torch.cat(parts) * chosen.weights.flatten()[pairs, None]
    return out.view(num_tokens, num_chosen, -1).transpose(0, 1)
