"""Unquantised weights: what a module of a recipe has that the recipe leaves alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.layers.formats.fills import noise
from workers.layers.formats.format import FLOATS, Cut, StoredTensor, WeightFormat


@dataclass(frozen=True, slots=True)
class Plain(WeightFormat):
    """A float matrix as it stands."""

    @property
    def title(self) -> str:
        return "unquantised"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(whole, FLOATS, noise)}

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        return cut.rows, cut.columns

    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        return tensors["weight"].float()


PLAIN = Plain()
