"""Adapters of experts whose products are made expert by expert: each adds to what its own make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.adapters.worn import Group, WornAdapters
from workers.layers.moe.products import experts_in_torch
from workers.layers.routed_experts import RoutedProducts, RoutedWeights

_GATE_UP, _DOWN = range(2), range(2, 3)

AddToExpert = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, range, Sequence[Group]], None
]
"""ExpertBank.add_to."""


@dataclass(frozen=True, slots=True)
class AddedToExperts:
    """A RoutedProducts for any dtype; without an adapter in the step it is products."""

    products: RoutedProducts
    add_to: AddToExpert
    worn: WornAdapters

    def __call__(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: RoutedWeights,
    ) -> torch.Tensor:
        if not self.worn.groups:
            return self.products(hidden, ids, weights, experts)
        return experts_in_torch(hidden, ids, weights, experts, self)

    def to_gate_up(
        self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, place: int
    ) -> None:
        self.add_to(out, x, tokens, place, _GATE_UP, self.worn.groups)

    def to_down(self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, place: int) -> None:
        self.add_to(out, x, tokens, place, _DOWN, self.worn.groups)
