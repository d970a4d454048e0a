"""A linear layer whose weight a checkpoint stores in a format, and a model of such layers.

When all tensors of a layer have been read, its weight is made of them. Knows no file.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from workers.layers.formats.format import Cut, Shape, WeightFormat
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.formats.stored import Arrivals, Settling, StoredSlot, StoredWeight
from workers.layers.kept.weight import KeptWeight, join_kept
from workers.layers.sharding import (
    ShardContext,
    ShardedLayer,
    TensorSource,
    WeightSlot,
    weight_slots,
)


class KeptMultiply(Protocol):
    """x (n, columns) @ weight.T of one kept weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(n, rows)."""

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """(parts, n, rows), whose sum over parts that is, in a tensor of its own."""


class LinearLayer(ShardedLayer):
    """Has a weight (rows, columns) of one or more checkpoint modules, whose rows lie one after
    another.

    weight: no parameter where kept has it in the form that the checkpoint has.
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.kept: KeptWeight | None = None
        self._multiply: KeptMultiply | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the weight is in the form that the checkpoint has."""
        return self.kept is not None

    def keep(self, weight: KeptWeight) -> None:
        """From here on the layer has its weight in this form only."""
        self.register_parameter("weight", None)
        self.kept = weight

    def multiply_kept_by(self, make: Callable[[KeptWeight], KeptMultiply]) -> None:
        """Lets the module be called where it keeps its weight; a model that makes its products
        without calling its modules has no need of it."""
        if self.kept is not None:
            self._multiply = make(self.kept)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (n, columns) -> x @ weight.T + bias, (n, rows)."""
        if self._multiply is None:
            return functional.linear(x, self.weight, bias)
        made = self._multiply(x)
        return made if bias is None else made.add_(bias)

    def partial_products(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(parts, n, rows), whose sum over parts is product(x, bias): for who sums up himself."""
        if self._multiply is None:
            return functional.linear(x, self.weight, bias).unsqueeze(0)
        return with_bias_(self._multiply.parts(x), bias)

    @abstractmethod
    def weight_cuts(self) -> Mapping[str, Cut]:
        """Checkpoint module, "" for the layer's own, -> what of it this rank holds."""


def with_bias_(parts: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """parts (parts, n, rows), the first of which gets bias (rows,)."""
    if bias is not None:
        parts[0].add_(bias)
    return parts


class FormattedLayer(ShardedLayer):
    """Finds out by itself which of its checkpoint tensors are stored in formats."""

    @property
    @abstractmethod
    def is_kept(self) -> bool:
        """As LinearLayer.is_kept, of all its weights."""

    @abstractmethod
    def store(
        self,
        prefix: str,
        recipe: WeightRecipe,
        slots: dict[str, WeightSlot],
        shard: ShardContext,
        keeps: bool,
    ) -> set[str]:
        """Put slots of formats in the place of the layer's own, where the recipe says so. prefix:
        of its names in the checkpoint. keeps: whether its products are made with weights as they
        are stored, where they take them. Returns names that are of no use. Raises as stored_by."""


class Stored(Settling, Protocol):
    """What is being read for one weight."""

    def of(self, name_part: str) -> tuple[StoredWeight, str]:
        """The module's weight and the part of it that a name part is."""


class StoredLayer:
    """The weight of one layer while it is being read. is_kept: whether the layer keeps it as it is
    stored, where products take that."""

    def __init__(
        self,
        layer: LinearLayer,
        prefix: str,
        formats: Mapping[str, WeightFormat],
        shard: ShardContext,
        is_kept: bool,
    ) -> None:
        self._layer, self._is_kept = layer, is_kept
        self._dtype = shard.dtype
        self.weights = {
            module: StoredWeight(_module_name(prefix, module), formats[module], cut, shard.device)
            for module, cut in layer.weight_cuts().items()
        }
        self._arrivals = Arrivals(len(self.checkpoint_shapes()))

    def checkpoint_shapes(self) -> dict[str, Shape]:
        """Name part -> whole shape."""
        return {
            _joined(module, part): shape
            for module, weight in self.weights.items()
            for part, shape in weight.shapes().items()
        }

    def of(self, name_part: str) -> tuple[StoredWeight, str]:
        """The module's weight and the part of it that a name part is."""
        module, _, part = name_part.rpartition(".")
        return self.weights[module], part

    def settle(self) -> None:
        """Called behind every part that is in place. The last one's caller makes the weight."""
        if not self._arrivals.is_last():
            return
        weights = self.weights.values()
        pieces = [weight.kept() for weight in weights] if self._is_kept else [None]
        kept = join_kept(pieces, self._dtype)
        if kept is not None:
            self._layer.keep(kept)
        else:
            whole = torch.cat([weight.dequantised().to(self._dtype) for weight in weights])
            self._layer.weight = nn.Parameter(whole, requires_grad=False)
        for weight in weights:
            weight.release()

    def settle_unread(self) -> None:
        """As settle, from shapes alone, of a model on the meta device."""
        weights = self.weights.values()
        pieces = [x.format.kept_unread(x.cut) for x in weights] if self._is_kept else [None]
        kept = join_kept(pieces, self._dtype)
        if kept is not None:
            self._layer.keep(kept)


@dataclass(frozen=True, slots=True)
class FormatSlot(StoredSlot):
    """Where one of a format's tensors goes."""

    stored: Stored

    def load(self, tensor: TensorSource) -> None:
        weight, part = self.stored.of(self.name_part)
        weight.load(part, tensor)

    @property
    def format_title(self) -> str:
        return self.stored.of(self.name_part)[0].format.title

    def obstacle(self, shape: Shape, dtype: torch.dtype) -> str:
        weight, part = self.stored.of(self.name_part)
        if _without_ones(shape) != _without_ones(self.shape):
            return f"has shape {shape}, {weight.format.title} says {self.shape}"
        if dtype not in weight.dtypes(part):
            return f"has dtype {dtype}, {weight.format.title} says {weight.dtypes(part)}"
        return ""

    def dummy(self, name: str, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        weight, part = self.stored.of(self.name_part)
        return weight.filled(part, generator)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Of a model. slots: where a checkpoint's tensors go, by name. unread: names that are of no
    use."""

    slots: dict[str, WeightSlot]
    unread: frozenset[str]


def unquantised(model: nn.Module) -> StoredTensors:
    """Every layer's weight is a tensor of the checkpoint."""
    return StoredTensors(weight_slots(model), frozenset())


def stored_by(
    recipe: WeightRecipe,
    model: nn.Module,
    shard: ShardContext,
    keeping: Collection[nn.Module] = (),
) -> StoredTensors:
    """Gives every linear layer of a model made with has_formats a weight, or what will become one.

    keeping: layers whose products are made with weights as they are stored, where that is a form
    that products take. Raises ConfigError where ranks cut a format's weights inside of what has a
    scale in common.
    """
    slots = weight_slots(model)
    unread: set[str] = set()
    for path, layer in model.named_modules():
        if isinstance(layer, FormattedLayer):
            prefix = layer.checkpoint_prefix(path)
            unread |= layer.store(prefix, recipe, slots, shard, layer in keeping)
        if not isinstance(layer, LinearLayer):
            continue
        prefix = layer.checkpoint_prefix(path)
        modules = {part: _module_name(prefix, part) for part in layer.weight_cuts()}
        formats = {part: recipe.format_of(module) for part, module in modules.items()}
        if all(one == PLAIN for one in formats.values()):
            layer.weight = shard.empty_parameter(*layer.weight.shape)
            continue
        stored = StoredLayer(layer, prefix, formats, shard, is_kept=layer in keeping)
        for module in modules.values():
            del slots[f"{module}.weight"]
        for part, shape in stored.checkpoint_shapes().items():
            slots[prefix + part] = FormatSlot(layer, part, shape, stored)
        unread |= {f"{modules[x]}.{part}" for x, one in formats.items() for part in one.unread}
    return StoredTensors(slots, frozenset(unread))


def _module_name(prefix: str, module: str) -> str:
    """In the checkpoint. module: "" for the layer's own."""
    return (prefix + module).rstrip(".")


def _joined(module: str, part: str) -> str:
    return f"{module}.{part}" if module else part


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
