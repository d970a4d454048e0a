"""MXFP4: four-bit floats (E2M1), two to a byte, with a power of two to every 32 of a row.

OCP Microscaling Formats (MX) 1.0. compressed-tensors stores weight_packed and weight_scale; gpt-oss
stores its experts' as blocks and scales of the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.errors import ConfigError
from workers.layers.formats.fills import bits, constant
from workers.layers.formats.format import (
    Cut,
    StoredTensor,
    WeightFormat,
    check_on_border,
    in_blocks,
)

GROUP_SIZE = 32
_E8M0_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DUMMY_SCALES = constant(120)
"""Exponents of 2**-7: values of about 2.9 become noise of about 0.02."""


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 (..., groups * 32). blocks: uint8 (..., groups, 16), the low four bits first. scales:
    uint8 (..., groups), exponents that begin at -127."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=blocks.device)
    values = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _E8M0_BIAS
    return torch.ldexp(values[pairs.long()], exponents).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """A matrix of compressed-tensors' "mxfp4-pack-quantized"."""

    @property
    def unread(self) -> tuple[str, ...]:
        return ("input_scale", "input_global_scale")

    @property
    def title(self) -> str:
        return "mxfp4"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        rows, columns = whole
        if columns % GROUP_SIZE:
            raise ConfigError(f"{columns} input features are no whole groups of {GROUP_SIZE}")
        scales = (rows, columns // GROUP_SIZE)
        return {
            "weight_packed": StoredTensor((rows, columns // 2), (torch.uint8,), bits),
            "weight_scale": StoredTensor(scales, (torch.uint8,), DUMMY_SCALES),
        }

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        check_on_border(cut.columns, GROUP_SIZE, cut.whole[1], "groups")
        size = 2 if part == "weight_packed" else GROUP_SIZE
        return cut.rows, in_blocks(cut.columns, size)

    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        blocks = tensors["weight_packed"].view(cut.num_rows, -1, GROUP_SIZE // 2)
        return dequantise_mxfp4(blocks, tensors["weight_scale"])
