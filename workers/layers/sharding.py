"""How a layer is cut over tensor-parallel ranks, and how a checkpoint's tensors reach it.

A layer names the checkpoint tensors it is made of and takes from each the slice of its rank. Knows
no file format: a tensor is anything that has a shape and can be sliced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from workers.errors import ConfigError
from workers.parallel.expert_group import ExpertGroup
from workers.parallel.group import TPGroup


class TensorSource(Protocol):
    """A checkpoint tensor: a torch.Tensor, or one still on disk of which only a slice is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


MAX_PIECE_ELEMENTS = 1 << 23
DUMMY_STD = 0.02
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def copy_slice(target: torch.Tensor, tensor: TensorSource, rows: slice, *columns: slice) -> None:
    """target.copy_(tensor[rows, *columns]), a few rows at a time.

    rows has a start and a stop. A piece has at most MAX_PIECE_ELEMENTS elements unless a single row
    has more: what reads pieces ahead of the device needs no more host memory than that.
    """
    row_elements = max(1, math.prod(target.shape[1:]))
    num_rows = max(1, MAX_PIECE_ELEMENTS // row_elements)
    for start in range(rows.start, rows.stop, num_rows):
        stop = min(start + num_rows, rows.stop)
        piece = tensor[(slice(start, stop), *columns)]
        target[start - rows.start : stop - rows.start].copy_(piece)


@dataclass(frozen=True, slots=True)
class ShardContext:
    """Where a layer's parameters live: its rank in the group, their dtype and their device.

    is_deterministic: on a GPU, a row's results must not depend on the number of rows. ep_size:
    parts of the group that own experts of their own. has_formats: what linear layers' weights are
    made of is not known yet. num_redundant_experts: of a layer, room for copies on all parts.
    """

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    is_deterministic: bool = False
    ep_size: int = 1
    has_formats: bool = False
    num_redundant_experts: int = 0

    @property
    def experts(self) -> ExpertGroup:
        """This rank's place among those that share a layer's experts."""
        return ExpertGroup.of_rank(self.tp.rank, self.tp.size, self.ep_size)

    def empty_parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter of this dtype and device, without gradient."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)

    def empty_weight(self, *shape: int) -> nn.Parameter:
        """As empty_parameter, of linear layers: without memory where formats are to be found."""
        if not self.has_formats:
            return self.empty_parameter(*shape)
        data = torch.empty(shape, dtype=self.dtype, device="meta")
        return nn.Parameter(data, requires_grad=False)


class ShardedLayer(nn.Module, ABC):
    """A layer that loads its rank's share of one or more checkpoint tensors."""

    @abstractmethod
    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name part -> whole, unsharded shape of every checkpoint tensor the layer is made of."""

    @abstractmethod
    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        """Copy this rank's slice of the whole tensor called name_part into the parameters.

        tensor has the shape that checkpoint_shapes gives for name_part.
        """

    def shard_as_it_lies(self, name_part: str) -> tuple[nn.Parameter, tuple[slice, ...]] | None:
        """The parameter that is one slice of the whole tensor called name_part, and that slice.

        None where the parameter is put together otherwise.
        """
        return None

    def checkpoint_prefix(self, module_path: str) -> str:
        """What precedes a name part in the checkpoint, for a layer at module_path in the model."""
        return f"{module_path}."


class FusedLayer(ShardedLayer):
    """A layer that joins several checkpoint modules, which are its siblings there."""

    def checkpoint_prefix(self, module_path: str) -> str:
        parent, _, _ = module_path.rpartition(".")
        return f"{parent}." if parent else ""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes. shape: of the whole tensor."""

    layer: ShardedLayer
    name_part: str
    shape: tuple[int, ...]

    def load(self, tensor: TensorSource) -> None:
        self.layer.load_shard(self.name_part, tensor)

    def settle(self) -> None:
        """Called once, when what load or map wrote is in place."""

    @property
    def keeps_dtype(self) -> bool:
        """Whether a tensor's bits are wanted; else it is converted to the model's dtype."""
        return False

    def obstacle(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Why no tensor of this shape and dtype goes here; "" where one does."""
        if shape != self.shape:
            return f"has shape {shape}, the config says {self.shape}"
        if dtype not in _FLOATS:
            return f"has dtype {dtype}, where the config says that it is unquantised"
        return ""

    def dummy(self, name: str, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor of dummy weights, on the generator's device: norms are ones, biases zeros,
        matrices noise. name: in the checkpoint."""
        tensor = torch.empty(self.shape, dtype=dtype, device=generator.device)
        if name.endswith(".bias"):
            return tensor.zero_()
        if len(self.shape) == 1:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, DUMMY_STD, generator=generator)

    def map(self, tensor: TensorSource) -> bool:
        """Let the parameter be the tensor's own memory, if it lies there as it is wanted.

        That is in one piece and of the parameter's dtype. Whether it was; nothing is done if not.
        """
        found = self.layer.shard_as_it_lies(self.name_part)
        if found is None:
            return False
        parameter, index = found
        piece = tensor[index]
        if piece.dtype != parameter.dtype or not piece.is_contiguous():
            return False
        parameter.data = piece
        return True


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Checkpoint name -> slot for every ShardedLayer of a model with Hugging Face module names."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, ShardedLayer):
            prefix = module.checkpoint_prefix(path)
            for part, shape in module.checkpoint_shapes().items():
                slots[prefix + part] = WeightSlot(module, part, shape)
    return slots


def divide(total: int, tp_size: int, what: str) -> int:
    """total / tp_size, or ConfigError that names what cannot be divided."""
    if total % tp_size:
        raise ConfigError(f"{what}={total} cannot be divided over tp_size={tp_size} ranks")
    return total // tp_size


@dataclass(frozen=True, slots=True)
class KVHeadShard:
    """Which KV heads a rank holds: its share, or one that several ranks hold alike."""

    first_head: int
    num_heads: int

    @classmethod
    def of_rank(cls, num_kv_heads: int, rank: int, tp_size: int) -> KVHeadShard:
        """Rank's heads. Raises ConfigError unless one of the two numbers divides the other."""
        if num_kv_heads % tp_size == 0:
            num_heads = num_kv_heads // tp_size
            return cls(rank * num_heads, num_heads)
        if tp_size % num_kv_heads == 0:
            return cls(rank * num_kv_heads // tp_size, 1)
        raise ConfigError(
            f"num_kv_heads={num_kv_heads} can be neither divided over tp_size={tp_size} ranks "
            "nor replicated evenly"
        )
