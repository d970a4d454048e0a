"""AWQ as AutoAWQ's "gemm" version stores it: int4, eight output features to a word.

Lin et al., "AWQ: Activation-aware Weight Quantization", 2023. A word has features 0, 2, 4, 6, 1, 3,
5, 7 of its eight, lowest bits first.
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
    unpack,
)

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its features is."""
_DUMMY_ZEROS = -0x78787879  # 7 and 8 by turns in an int32


@dataclass(frozen=True, slots=True)
class Awq(GroupedFormat):
    """group_size: columns to a scale and a zero."""

    group_size: int
    bits = 4
    has_act_order = False
    is_symmetric = False

    @property
    def title(self) -> str:
        return f"awq int4 ({self.group_title})"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        out_words, in_features = self.words(whole[0]), whole[1]
        groups = in_features // self.columns_per_group(in_features)
        zeros = constant(_DUMMY_ZEROS)
        return {
            "qweight": StoredTensor((in_features, out_words), (torch.int32,), bits),
            "qzeros": StoredTensor((groups, out_words), (torch.int32,), zeros),
            "scales": StoredTensor((groups, whole[0]), FLOATS, INT4_SCALE),
        }

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        self.check_words(cut.rows, cut.whole[0])
        columns = cut.columns if part == "qweight" else self.group_slice(cut)
        return columns, cut.rows if part == "scales" else in_blocks(cut.rows, self.values_per_word)

    def grouped(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> GroupedWeight:
        size = self.columns_per_group(cut.whole[1])
        return GroupedWeight(
            values=_by_feature(tensors["qweight"]).T,
            scales=tensors["scales"].T,
            zeros=_by_feature(tensors["qzeros"]).T,
            groups=consecutive_groups(tensors["scales"], cut, size),
        )


def _by_feature(words: torch.Tensor) -> torch.Tensor:
    """(n, words) -> (n, out_features), in order."""
    places = unpack(words, Awq.bits, 1).view(*words.shape, len(_PLACES))
    return places[:, :, list(_PLACES)].flatten(1)
