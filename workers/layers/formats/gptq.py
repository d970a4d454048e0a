"""GPTQ as AutoGPTQ and GPTQModel store it: integers of 2, 4 or 8 bits, packed over input features.

Frantar et al., "GPTQ: Accurate Post-Training Quantization", 2022. With act-order (desc_act) the
columns of a group do not lie together: g_idx has each column's group.
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
class Gptq(GroupedFormat):
    """has_act_order: g_idx counts. zero_offset: what is added to a stored zero, 1 in checkpoints of
    the first version and 0 in those of the second. is_symmetric: stated; zeros are read all the
    same."""

    bits: int
    group_size: int
    has_act_order: bool
    zero_offset: int
    is_symmetric: bool

    @property
    def title(self) -> str:
        return f"gptq int{self.bits} ({self.group_title})"

    @property
    def unread(self) -> tuple[str, ...]:
        return () if self.has_act_order else ("g_idx",)

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        out_features, in_features = whole
        size = self.columns_per_group(in_features)
        groups = in_features // size
        zeros = (groups, self.words(out_features))
        packed = (self.words(in_features), out_features)
        stored = {
            "qweight": StoredTensor(packed, (torch.int32,), bits),
            "qzeros": StoredTensor(zeros, (torch.int32,), constant(self._dummy_zeros())),
            "scales": StoredTensor((groups, out_features), FLOATS, INT4_SCALE),
        }
        if self.has_act_order:

            def fill(target: torch.Tensor, generator: torch.Generator) -> None:
                target.copy_(torch.arange(in_features, device=target.device) // size)

            stored["g_idx"] = StoredTensor((in_features,), (torch.int32, torch.int64), fill)
        return stored

    def _dummy_zeros(self) -> int:
        """A word of zeros in the middle of the values; of others every second one is one less."""
        middle = (1 << (self.bits - 1)) - self.zero_offset
        zeros = [middle - (0 if self.is_symmetric else place % 2) for place in range(32)]
        word = sum(zeros[shift // self.bits] << shift for shift in range(0, 32, self.bits))
        return word - (1 << 32) if word >= 1 << 31 else word

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        self.check_words(cut.columns, cut.whole[1])
        self.check_words(cut.rows, cut.whole[0])
        if part == "qweight":
            return in_blocks(cut.columns, self.values_per_word), cut.rows
        if part == "g_idx":
            return (cut.columns,)
        rows = cut.rows if part == "scales" else in_blocks(cut.rows, self.values_per_word)
        return self.group_slice(cut), rows

    def grouped(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> GroupedWeight:
        zeros = unpack(tensors["qzeros"], self.bits, 1) + self.zero_offset
        return GroupedWeight(
            values=unpack(tensors["qweight"], self.bits, 0).T,
            scales=tensors["scales"].T,
            zeros=zeros.T,
            groups=self._group_of_columns(tensors, cut),
        )

    def _group_of_columns(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        if self.has_act_order:
            return stated_groups(tensors["g_idx"], tensors["scales"].shape[0])
        size = self.columns_per_group(cut.whole[1])
        return consecutive_groups(tensors["qweight"], cut, size)
