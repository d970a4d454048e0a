"""8-bit weights, floating point or integer, that stand for themselves times a scale."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.layers.formats.fills import FP8_SCALE, INT8_SCALE, bits, fp8_noise, noise
from workers.layers.formats.format import FLOATS, Cut, StoredTensor, WeightFormat
from workers.layers.formats.scaling import PerChannel, Scaling
from workers.layers.kept.weight import KeptWeight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Scaled(WeightFormat):
    """dtype: FP8 or torch.int8. scale_part: what checkpoints call the scales.

    Scales of activations are left unread: products round these by scales of their own rows, which
    is closer than one that was found beforehand.
    """

    dtype: torch.dtype
    scaling: Scaling
    scale_part: str = "weight_scale"

    @property
    def unread(self) -> tuple[str, ...]:
        return ("input_scale", "output_scale")

    @property
    def title(self) -> str:
        return f"{'fp8' if self.dtype == FP8 else 'int8'} ({self.scaling.title})"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        is_fp8 = self.dtype == FP8
        scales = (*FLOATS, torch.float8_e8m0fnu)
        scale_shape = self.scaling.shape(whole)
        return {
            "weight": StoredTensor(whole, (self.dtype,), fp8_noise if is_fp8 else bits),
            self.scale_part: StoredTensor(scale_shape, scales, FP8_SCALE if is_fp8 else INT8_SCALE),
        }

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        return (cut.rows, cut.columns) if part == "weight" else self.scaling.slices(cut)

    def kept(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> KeptWeight | None:
        if self.dtype != FP8:
            return None
        return self.scaling.kept_fp8(tensors["weight"], tensors[self.scale_part])

    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        return tensors["weight"].float() * self.scaling.spread(tensors[self.scale_part], cut)


@dataclass(frozen=True, slots=True)
class RoundedToFp8(WeightFormat):
    """A float matrix in the checkpoint, rounded to FP8 with a scale a row when it has been read.

    A rank that holds some of the columns reads whole rows: a row's scale is the same on all.
    """

    target = Scaled(FP8, PerChannel())

    @property
    def title(self) -> str:
        return "fp8 (per channel, rounded while loading)"

    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(whole, FLOATS, noise)}

    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        return cut.rows, slice(0, cut.whole[1])

    def rounded(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> dict[str, torch.Tensor]:
        """The tensors of target."""
        weight = tensors["weight"].float()
        scale = weight.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        scale /= FP8_MAX
        values = (weight[:, cut.columns] / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        return {"weight": values, self.target.scale_part: scale}

    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        return self.target.dequantise(self.rounded(tensors, cut), cut)

    def kept(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> KeptWeight | None:
        return self.target.kept(self.rounded(tensors, cut), cut)
