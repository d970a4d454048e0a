"""Quantised checkpoints of tiny models, packed here value by value as their formats are published.

A quantiser gives a module's tensors and, apart from any unpacking, the matrix that they stand for.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.float8_e4m3fn
_LINEAR = ("_proj", ".w1", ".w2", ".w3", "_proj_with_mqa", "_proj_qkvz", "_proj_ba")


@dataclass(frozen=True)
class Quantised:
    """tensors: by part. matrix: what they stand for. bound: of |weight - matrix|, by element."""

    tensors: dict[str, torch.Tensor]
    matrix: torch.Tensor
    bound: torch.Tensor


Quantiser = Callable[[torch.Tensor], Quantised]


def _pack(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int (rows, columns) in [0, 16) -> int32 (rows, columns / 8): place i has value order[i]."""
    words = []
    for row in values.tolist():
        for start in range(0, len(row), 8):
            word = sum(row[start + value] << (4 * place) for place, value in enumerate(order))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(values.shape[0], -1)


def _rounded(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = weight / scale
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def by_scale(
    dtype: torch.dtype, blocks: tuple[int, int] | None, name: str = "weight_scale"
) -> Quantiser:
    """blocks: rows and columns of a scale; 0 for all of them. None: one scale, without an axis."""

    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = blocks or (0, 0)
        rows, columns = rows or weight.shape[0], columns or weight.shape[1]
        tops, steps = [], 127.0 if dtype == torch.int8 else 448.0
        for top in range(0, weight.shape[0], rows):
            line = weight[top : top + rows].split(columns, 1)
            tops.append(torch.stack([block.abs().max() / steps for block in line]))
        scales = torch.stack(tops)
        spread = torch.ones_like(weight)
        for i, row in enumerate(scales):
            for j, scale in enumerate(row):
                spread[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = scale
        values = _rounded(weight, spread, dtype)
        matrix = values.float() * spread
        bound = spread / 2 if dtype == torch.int8 else weight.abs() / 16 + spread * 2**-10
        stored = scales.reshape(()) if blocks is None else scales
        return Quantised({"weight": values, name: stored}, matrix, bound)

    return quantise


@dataclass(frozen=True)
class _Ints:
    """Of int4: values (rows, columns), scales and zeros (rows, groups)."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    matrix: torch.Tensor
    bound: torch.Tensor


def _int4(weight: torch.Tensor, group_of: torch.Tensor) -> _Ints:
    values, num_groups = torch.zeros(weight.shape, dtype=torch.int32), int(group_of.max()) + 1
    scales = torch.zeros(weight.shape[0], num_groups)
    zeros = torch.zeros(weight.shape[0], num_groups, dtype=torch.int32)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=-1e-3), part.amax(1).clamp(min=1e-3)
        scales[:, group] = ((high - low) / 14).half().float()
        zeros[:, group] = (-low / scales[:, group]).round().clamp(1, 15).int()
        shifted = part / scales[:, group, None] + zeros[:, group, None]
        values[:, group_of == group] = shifted.round().clamp(0, 15).int()
    spread = scales[:, group_of]
    matrix = (values - zeros[:, group_of]) * spread
    return _Ints(values, scales, zeros, matrix, spread)


def _consecutive(weight: torch.Tensor, size: int) -> torch.Tensor:
    return torch.arange(weight.shape[1]) // size


def awq(size: int) -> Quantiser:
    def quantise(weight: torch.Tensor) -> Quantised:
        ints = _int4(weight, _consecutive(weight, size))
        tensors = {
            "qweight": _pack(ints.values.T, AWQ_ORDER),
            "qzeros": _pack(ints.zeros.T, AWQ_ORDER),
            "scales": ints.scales.T.half().contiguous(),
        }
        return Quantised(tensors, ints.matrix, ints.bound)

    return quantise


def gptq(size: int, has_act_order: bool) -> Quantiser:
    """The first version: zeros are stored less 1."""

    def quantise(weight: torch.Tensor) -> Quantised:
        group_of = _consecutive(weight, size)
        if has_act_order:
            shuffled = torch.randperm(len(group_of), generator=torch.Generator().manual_seed(3))
            group_of = group_of[shuffled]
        ints = _int4(weight, group_of)
        tensors = {
            "qweight": _pack(ints.values).T.contiguous(),
            "qzeros": _pack(ints.zeros.T - 1),
            "scales": ints.scales.T.half().contiguous(),
            "g_idx": group_of.int(),
        }
        return Quantised(tensors, ints.matrix, ints.bound)

    return quantise


def packed(size: int) -> Quantiser:
    """Of compressed-tensors, with zeros."""

    def quantise(weight: torch.Tensor) -> Quantised:
        ints = _int4(weight, _consecutive(weight, size))
        tensors = {
            "weight_packed": _pack(ints.values),
            "weight_zero_point": _pack(ints.zeros.T).T.contiguous(),
            "weight_scale": ints.scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        scales = ints.scales.bfloat16().float()[:, _consecutive(weight, size)]
        zeros = ints.zeros[:, _consecutive(weight, size)]
        return Quantised(tensors, (ints.values - zeros) * scales, ints.bound * 1.1)

    return quantise


def mxfp4(weight: torch.Tensor) -> Quantised:
    exponents, codes, matrix = [], [], torch.zeros_like(weight)
    for i, row in enumerate(weight):
        line = []
        for j, part in enumerate(row.split(32)):
            exponent = math.ceil(math.log2(float(part.abs().max()) / 6.0))
            line.append(exponent + 127)
            scaled = part * 2.0**-exponent
            nearest = (scaled.abs()[:, None] - FP4).abs().argmin(1)
            codes += (nearest + 8 * (scaled < 0)).tolist()
            matrix[i, j * 32 : j * 32 + 32] = FP4[nearest] * scaled.sign() * 2.0**exponent
        exponents.append(line)
    pairs = torch.tensor(codes, dtype=torch.uint8).view(weight.shape[0], -1, 2)
    scales = torch.tensor(exponents, dtype=torch.uint8)
    tensors = {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": scales}
    bound = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return Quantised(tensors, matrix, bound)


def quantise_folder(
    folder: Path, config: Mapping[str, Any], quantiser_of: Callable[[str], Quantiser | None]
) -> dict[str, torch.Tensor]:
    """Store a folder's linear modules anew, in place; config: its quantization_config.

    The tensors of the same model unquantised. Asserts that what is stored is near what was there.
    """
    plain = load_file(folder / "model.safetensors")
    stored, reference = {}, dict(plain)
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        quantise = quantiser_of(module) if module.endswith(_LINEAR) else None
        if quantise is None:
            stored[name] = tensor
            continue
        made = quantise(tensor.float())
        assert ((tensor - made.matrix).abs() <= made.bound + 1e-6).all(), name
        reference[name] = made.matrix
        stored |= {f"{module}.{part}": value for part, value in made.tensors.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(config)})
    )
    return reference
