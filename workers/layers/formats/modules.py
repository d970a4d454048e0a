"""Layers of many checkpoint modules, such as a mixture's experts, each stored in a format.

A module's weight is handed over as soon as its tensors have been read, and is copied to where the
layer keeps it. Knows no file.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from workers.layers.formats.format import Cut
from workers.layers.formats.layer import FormatSlot, FormattedLayer
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.formats.stored import Arrivals, StoredWeight
from workers.layers.kept.weight import KeptWeight
from workers.layers.sharding import WeightSlot


class ModulesLayer(FormattedLayer):
    """Made of matrices of checkpoint modules, called by their names behind the layer's prefix."""

    @abstractmethod
    def module_cuts(self) -> Mapping[str, Cut]:
        """Module -> what of it this rank holds."""

    @abstractmethod
    def modules_elsewhere(self) -> Mapping[str, tuple[int, int]]:
        """Modules that other ranks hold -> their whole (out_features, in_features)."""

    @abstractmethod
    def take(self, module: str, weight: torch.Tensor) -> None:
        """weight: float32 (rows, columns) of the module's cut."""

    @abstractmethod
    def keep(self, module: str, weight: KeptWeight | None) -> None:
        """The same in the form that the layer keeps its modules' weights in."""


class StoredModule:
    """One module's weight while it is being read."""

    def __init__(self, layer: ModulesLayer, module: str, weight: StoredWeight) -> None:
        self._layer, self._module = layer, module
        self.weight = weight
        self._arrivals = Arrivals(len(weight.shapes()))

    def of(self, name_part: str) -> tuple[StoredWeight, str]:
        return self.weight, name_part.rpartition(".")[2]

    def settle(self) -> None:
        """Called behind every part that is in place; hands the weight over behind the last."""
        if not self._arrivals.is_last():
            return
        self._hand_over()
        self.weight.release()

    def _hand_over(self) -> None:
        self._layer.take(self._module, self.weight.dequantised())


class _KeptModule(StoredModule):
    """Whose layer keeps weights as they are stored."""

    def _hand_over(self) -> None:
        self._layer.keep(self._module, self.weight.kept())


def store_modules(
    layer: ModulesLayer,
    prefix: str,
    recipe: WeightRecipe,
    slots: dict[str, WeightSlot],
    device: torch.device,
) -> set[str]:
    """As FormattedLayer.store, of a layer whose is_kept says how it takes weights."""
    stored_as = _KeptModule if layer.is_kept else StoredModule
    unread: set[str] = set()
    for module, cut in layer.module_cuts().items():
        weight_format = recipe.format_of(prefix + module)
        unread |= {f"{prefix}{module}.{part}" for part in weight_format.unread}
        if weight_format == PLAIN:
            continue
        weight = StoredWeight(prefix + module, weight_format, cut, device)
        stored = stored_as(layer, module, weight)
        del slots[f"{prefix}{module}.weight"]
        for part, shape in weight.shapes().items():
            name = f"{module}.{part}"
            slots[prefix + name] = FormatSlot(layer, name, shape, stored)
    for module, whole in layer.modules_elsewhere().items():
        weight_format = recipe.format_of(prefix + module)
        if weight_format != PLAIN:
            del slots[f"{prefix}{module}.weight"]
            parts = (*weight_format.tensors(whole), *weight_format.unread)
            unread |= {f"{prefix}{module}.{part}" for part in parts}
    return unread
