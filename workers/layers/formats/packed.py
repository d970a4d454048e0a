"""Integers of compressed-tensors' "pack-quantized": packed over input features, offset by half
their range, with scales a group and, where they are not symmetric, zeros packed over rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.layers.formats.fills import INT4_SCALE, bits, constant
from workers.layers.formats.format import FLOATS, Cut, StoredTensor, in_blocks
from workers.layers.formats.grouped import (
    GroupedFormat,
    GroupedWeight,
    consecutive_groups,
    stated_groups,
    unpack,
)


@dataclass(frozen=True, slots=True)
class Packed(GroupedFormat):
    """bits: 4 or 8. has_act_order: weight_g_idx has each column's group."""

    bits: int
    group_size: int
    is_symmetric: bool
    has_act_order: bool

    @property
    def unread(self) -> tuple[str, ...]:
        return ("weight_shape",)

    @property
    def title(self) -> str:
        return f"int{self.bits} ({self.group_title})"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        out_features, in_features = whole
        groups = in_features // self.columns_per_group(in_features)
        packed = (out_features, self.words(in_features))
        stored = {
            "weight_packed": StoredTensor(packed, (torch.int32,), bits),
            "weight_scale": StoredTensor((out_features, groups), FLOATS, INT4_SCALE),
        }
        if not self.is_symmetric:
            zeros = (self.words(out_features), groups)
            stored["weight_zero_point"] = StoredTensor(zeros, (torch.int32,), constant(0))
        if self.has_act_order:
            whole_groups = StoredTensor((in_features,), (torch.int32, torch.int64), constant(0))
            stored["weight_g_idx"] = whole_groups
        return stored

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        self.check_words(cut.columns, cut.whole[1])
        if part == "weight_packed":
            return cut.rows, in_blocks(cut.columns, self.values_per_word)
        if part == "weight_g_idx":
            return (cut.columns,)
        if part == "weight_scale":
            return cut.rows, self.group_slice(cut)
        self.check_words(cut.rows, cut.whole[0])
        return in_blocks(cut.rows, self.values_per_word), self.group_slice(cut)

    def grouped(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> GroupedWeight:
        scales, half = tensors["weight_scale"], 1 << (self.bits - 1)
        if self.is_symmetric:
            zeros = torch.full(scales.shape, half, dtype=torch.int32, device=scales.device)
        else:
            zeros = unpack(tensors["weight_zero_point"], self.bits, 0)
        if self.has_act_order:
            groups = stated_groups(tensors["weight_g_idx"], scales.shape[1])
        else:
            size = self.columns_per_group(cut.whole[1])
            groups = consecutive_groups(scales, cut, size)
        return GroupedWeight(unpack(tensors["weight_packed"], self.bits, 1), scales, zeros, groups)
