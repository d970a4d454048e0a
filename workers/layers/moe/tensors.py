"""How the tensors of a checkpoint's experts reach a rank's share of them.

Every expert has tensors of its own, or one tensor holds all of them. Knows no product.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.format import Cut
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.formats.stacks import StackCut, StackSlot, StoredStack, dequantising
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import Fp8Blocks
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.moe.spec import MixtureSpec
from workers.layers.routed_experts import RoutedWeights
from workers.layers.sharding import ShardedLayer, TensorSource, WeightSlot, copy_slice
from workers.parallel.expert_group import ExpertShare


class ExpertTensors(Protocol):
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As ShardedLayer.checkpoint_shapes, of routed experts."""

    def load(self, name_part: str, tensor: TensorSource) -> None:
        """As ShardedLayer.load_shard."""


@dataclass(frozen=True, slots=True)
class GatedTargets:
    """Where one expert's matrices, or a shared piece's, go; columns: its columns in the tensor."""

    weights: RoutedWeights
    hidden_size: int
    columns: slice

    def load(self, place: int, part: str, tensor: TensorSource) -> None:
        """part: "gate", "up" (width, hidden_size) or "down" (hidden_size, width)."""
        if part == "down":
            rows = slice(0, self.hidden_size)
            copy_slice(self.weights.down[place], tensor, rows, self.columns)
            return
        gate, up = self.weights.gate_up[place].chunk(2)
        copy_slice(gate if part == "gate" else up, tensor, self.columns)


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """experts.<number>.<part>.weight. Those of other ranks are not read."""

    spec: MixtureSpec
    share: ExpertShare
    weights: RoutedWeights
    hidden_size: int

    def _parts(self) -> dict[str, str]:
        names = self.spec.names
        return {names.gate: "gate", names.up: "up", names.down: "down"}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        width, hidden = self.spec.width, self.hidden_size
        return {
            f"experts.{expert}.{name}.weight": (hidden, width)
            if part == "down"
            else (width, hidden)
            for expert in range(self.spec.num_experts)
            for name, part in self._parts().items()
        }

    def modules(self) -> dict[str, Cut | None]:
        """Of routed experts, without ".weight"; None for those of other ranks."""
        first, hidden = self.share.first_column, self.hidden_size
        columns, everything = slice(first, first + self.share.num_columns), slice(0, hidden)
        up = Cut((self.spec.width, hidden), columns, everything)
        down = Cut((hidden, self.spec.width), everything, columns)
        return {
            f"experts.{expert}.{name}": None
            if self.share.place_of(expert) is None
            else (down if part == "down" else up)
            for expert in range(self.spec.num_experts)
            for name, part in self._parts().items()
        }

    def take(self, module: str, weight: torch.Tensor) -> None:
        """weight: this rank's part of it."""
        _, expert, name = module.split(".")
        place = self.share.place_of(int(expert))
        if place is None:
            raise ValueError(f"{module} lies on another rank")
        columns = slice(0, self.share.num_columns)
        targets = GatedTargets(self.weights, self.hidden_size, columns)
        targets.load(place, self._parts()[name], weight)

    def keep(self, module: str, weight: Fp8Blocks, kept: KeptExperts) -> None:
        """The same as it is stored."""
        _, expert, name = module.split(".")
        place, part = self.share.place_of(int(expert)), self._parts()[name]
        stack = kept.down if part == "down" else kept.gate_up
        if place is None or not isinstance(stack, Fp8Stack):
            raise ValueError(f"{module} is not kept here in blocks of FP8")
        first_row = self.share.num_columns if part == "up" else 0
        stack.take(place, first_row, weight.values, weight.scales)

    def load(self, name_part: str, tensor: TensorSource) -> None:
        _, expert, name, _ = name_part.split(".")
        place = self.share.place_of(int(expert))
        if place is None:
            return
        first = self.share.first_column
        columns = slice(first, first + self.share.num_columns)
        targets = GatedTargets(self.weights, self.hidden_size, columns)
        targets.load(place, self._parts()[name], tensor)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """experts.gate_up_proj (experts, hidden_size, 2 * width), gate and up in turns or one behind
    the other, down_proj (experts, width, hidden_size) and both biases, where there are any.

    The bias of down is one of the sum over ranks: the first rank of each part has it.
    """

    spec: MixtureSpec
    share: ExpertShare
    weights: RoutedWeights
    hidden_size: int

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        num, width, hidden = self.spec.num_experts, self.spec.width, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "experts.gate_up_proj": (num, hidden, 2 * width),
            "experts.down_proj": (num, width, hidden),
        }
        if self.spec.has_bias:
            shapes["experts.gate_up_proj_bias"] = (num, 2 * width)
            shapes["experts.down_proj_bias"] = (num, hidden)
        return shapes

    def load(self, name_part: str, tensor: TensorSource) -> None:
        for place, expert in self.share.experts_here.items():
            self._load_expert(name_part, tensor, place, slice(expert, expert + 1))

    def stacks(self) -> dict[str, StackCut]:
        """Of matrices (outputs, inputs), as quantised checkpoints have them."""
        share, num, hidden = self.share, self.spec.num_experts, self.hidden_size
        own = slice(share.first_expert, share.first_expert + share.num_own)
        first, stop = share.first_column, share.first_column + share.num_columns
        everything, width = slice(0, hidden), self.spec.width
        return {
            "experts.gate_up_proj": StackCut(
                (num, 2 * width, hidden), own, slice(2 * first, 2 * stop), everything
            ),
            "experts.down_proj": StackCut(
                (num, hidden, width), own, everything, slice(first, stop)
            ),
        }

    def take(self, stack: str, place: int, matrix: torch.Tensor) -> None:
        """matrix: (outputs, inputs) of one expert, this rank's part."""
        if stack == "experts.gate_up_proj":
            _take_turns(self.weights.gate_up[place], matrix)
        else:
            self.weights.down[place].copy_(matrix)

    def keep(
        self,
        stack: str,
        kept: Fp4Stack,
        place: int,
        blocks: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """The same as it is stored: uint8 blocks and scales. Raises ModelLoadError for scales that
        products do not take."""
        if stack == "experts.gate_up_proj":
            width = kept.rows // 2
            gate, up = slice(0, width), slice(width, kept.rows)
            fits = kept.take(place, gate, blocks[::2], scales[::2])
            fits &= kept.take(place, up, blocks[1::2], scales[1::2])
        else:
            fits = kept.take(place, slice(0, kept.rows), blocks, scales)
        if not fits:
            raise ModelLoadError(
                f"{stack} has scales above 2, which products with MXFP4 do not take; set "
                "engine.quantized_products to dequantize"
            )

    def _load_expert(self, name_part: str, tensor: TensorSource, place: int, expert: slice) -> None:
        share, weights = self.share, self.weights
        first, stop = share.first_column, share.first_column + share.num_columns
        everything = slice(0, self.hidden_size)
        if name_part == "experts.gate_up_proj":
            self._load_gate_up(weights.gate_up[place], tensor, expert)
        elif name_part == "experts.down_proj":
            weights.down[place].copy_(tensor[expert, slice(first, stop), everything][0].t())
        elif name_part == "experts.gate_up_proj_bias":
            piece = tensor[expert, slice(2 * first, 2 * stop)][0]
            _take_turns(_present(weights.gate_up_bias)[place], piece)
        elif share.first_column == 0:
            _present(weights.down_bias)[place].copy_(tensor[expert, everything][0])
        else:
            _present(weights.down_bias)[place].zero_()

    def _load_gate_up(self, target: torch.Tensor, tensor: TensorSource, expert: slice) -> None:
        everything, width = slice(0, self.hidden_size), self.spec.width
        first, stop = self.share.first_column, self.share.first_column + self.share.num_columns
        if self.spec.names.in_turns:
            piece = tensor[expert, everything, slice(2 * first, 2 * stop)][0]
            _take_turns(target, piece.t())
            return
        for half, start in zip(target.chunk(2), (0, width), strict=True):
            half.copy_(tensor[expert, everything, slice(start + first, start + stop)][0].t())


def store_stacks(
    layer: ShardedLayer,
    experts: StackedExperts,
    prefix: str,
    recipe: WeightRecipe,
    slots: dict[str, WeightSlot],
    device: torch.device,
    kept: Mapping[str, Fp4Stack],
) -> None:
    """As FormattedLayer.store, of experts in stacks. kept: by stack, where it stays as it is."""
    for stack, cut in experts.stacks().items():
        if recipe.format_of(prefix + stack) == PLAIN:
            continue
        if experts.share.num_copies:
            raise ConfigError(f"{prefix}{stack} is quantised: num_redundant_experts has to be 0")
        if not experts.spec.names.in_turns:
            raise ModelLoadError(
                f"{prefix}{stack} is quantised: of experts that a layer has in one tensor only "
                "gpt-oss's are read in a format"
            )
        del slots[prefix + stack]
        take = (
            partial(experts.keep, stack, kept[stack])
            if stack in kept
            else dequantising(prefix + stack, partial(experts.take, stack))
        )
        stored = StoredStack(cut, take, device)
        for part in ("blocks", "scales"):
            name = f"{stack}_{part}"
            slots[prefix + name] = StackSlot(layer, name, cut.shape(part), stored)


def _take_turns(gate_over_up: torch.Tensor, in_turns: torch.Tensor) -> None:
    gate, up = gate_over_up.chunk(2)
    gate.copy_(in_turns[::2])
    up.copy_(in_turns[1::2])


def _present(bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        raise ValueError("the experts have no biases")
    return bias
