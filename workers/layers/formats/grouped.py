"""Integers of a few bits with a scale and a zero a group of columns: what AWQ, GPTQ and
compressed-tensors store, each packed in a way of its own.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.format import Cut, WeightFormat, check_on_border, in_blocks
from workers.layers.kept.int4 import Int4Groups
from workers.layers.kept.weight import KeptWeight

WORD_BITS = 32
_KEPT_BITS = 4
"""Of the only values that products take as they are."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """(values - zeros) * scales.

    values: (rows, columns) int32, each in [0, 2**bits). scales: (rows, groups) float32. zeros:
    (rows, groups) int32. groups: (columns,) int64, the group of each column.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def dequantised(self) -> torch.Tensor:
        """(rows, columns) float32."""
        centred = self.values - self.zeros[:, self.groups]
        return centred * self.scales[:, self.groups]


class GroupedFormat(WeightFormat):
    """bits: of a value. group_size: columns to a scale; -1 for all of them. has_act_order: columns
    of a group do not lie together. is_symmetric: whether all zeros are the middle of the values, as
    far as the recipe says."""

    bits: int
    group_size: int
    has_act_order: bool
    is_symmetric: bool

    @abstractmethod
    def grouped(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> GroupedWeight:
        """A rank's slices unpacked."""

    def kept(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> KeptWeight | None:
        if self.bits != _KEPT_BITS:
            return None
        weight = self.grouped(tensors, cut)
        return Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)

    def kept_unread(self, cut: Cut) -> KeptWeight | None:
        """With act-order a part of the columns is taken not to be evenly of all groups."""
        is_part = cut.num_columns != cut.whole[1]
        if self.bits != _KEPT_BITS or (self.has_act_order and is_part):
            return None
        groups = self.group_slice(cut)
        num_groups = groups.stop - groups.start
        return Int4Groups.unread(
            cut.num_rows, cut.num_columns, num_groups, self.has_act_order, self.is_symmetric
        )

    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        return self.grouped(tensors, cut).dequantised()

    @property
    def values_per_word(self) -> int:
        return WORD_BITS // self.bits

    def columns_per_group(self, in_features: int) -> int:
        """Raises ConfigError where the groups do not fill a row."""
        size = in_features if self.group_size == -1 else self.group_size
        if in_features % size:
            raise ConfigError(f"{in_features} input features are no whole groups of {size}")
        return size

    def words(self, features: int) -> int:
        """That hold a value of each. Raises ConfigError where the last one would not be full."""
        if features % self.values_per_word:
            raise ConfigError(f"{features} features do not fill words of {self.values_per_word}")
        return features // self.values_per_word

    def group_slice(self, cut: Cut) -> slice:
        """The groups that a rank's columns are of: with act-order a column may be of any. Raises
        ConfigError where the cut falls inside of a group."""
        size = self.columns_per_group(cut.whole[1])
        if self.has_act_order or self.group_size == -1:
            return slice(0, cut.whole[1] // size)
        check_on_border(cut.columns, size, cut.whole[1], "groups")
        return in_blocks(cut.columns, size)

    def check_words(self, cut: slice, whole: int) -> None:
        """Raise ConfigError where a cut falls inside of a word."""
        check_on_border(cut, self.values_per_word, whole, "packed words")

    @property
    def group_title(self) -> str:
        size = "per channel" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"{size}, act-order" if self.has_act_order else size


def unpack(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 words of values, the lowest bits first -> int32, axis (0 or 1) longer by 32 / bits."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    behind = shifts.view(-1, 1) if axis == 0 else shifts
    values = torch.bitwise_right_shift(words.unsqueeze(axis + 1), behind)
    return torch.bitwise_and(values, (1 << bits) - 1).flatten(axis, axis + 1)


def stated_groups(g_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(columns,) int64: the groups that a checkpoint says. Raises ModelLoadError for others than it
    has."""
    groups = g_idx.long()
    least, most = groups.aminmax()
    if least < 0 or most >= num_groups:
        raise ModelLoadError(
            f"g_idx says groups {int(least)} to {int(most)}, the checkpoint has {num_groups}"
        )
    return groups


def consecutive_groups(tensors: torch.Tensor, cut: Cut, size: int) -> torch.Tensor:
    """(cut.num_columns,) int64 on the device of tensors: the first size columns are of group 0."""
    return torch.arange(cut.num_columns, device=tensors.device) // size
