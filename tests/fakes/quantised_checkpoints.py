"""Quantised checkpoints of tiny models, packed here value by value as their formats are published.

A quantiser gives a module's tensors and, apart from any unpacking, the matrix that they stand for.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
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


def _pack(values: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """int (rows, columns) in [0, 2**bits) -> int32 (rows, words): place i has value order[i]."""
    words, size = [], 32 // bits
    for row in values.tolist():
        for start in range(0, len(row), size):
            places = enumerate(order or range(size))
            word = sum(row[start + value] << (bits * place) for place, value in places)
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
    """values (rows, columns); scales, of the dtype they are stored in, and zeros (rows, groups)."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    matrix: torch.Tensor
    bound: torch.Tensor


def _ints(weight: torch.Tensor, group_of: torch.Tensor, bits: int, dtype: torch.dtype) -> _Ints:
    """A step less than there are, so that a rounded zero leaves nothing outside: half a step is
    lost at most."""
    most, num_groups = (1 << bits) - 1, int(group_of.max()) + 1
    values = torch.zeros(weight.shape, dtype=torch.int32)
    scales = torch.zeros(weight.shape[0], num_groups)
    zeros = torch.zeros(weight.shape[0], num_groups, dtype=torch.int32)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=-1e-3), part.amax(1).clamp(min=1e-3)
        scales[:, group] = ((high - low) / (most - 1)).to(dtype).float()
        zeros[:, group] = (-low / scales[:, group]).round().clamp(1, most).int()
        shifted = part / scales[:, group, None] + zeros[:, group, None]
        values[:, group_of == group] = shifted.round().clamp(0, most).int()
    spread = scales[:, group_of]
    matrix = (values - zeros[:, group_of]) * spread
    return _Ints(values, scales.to(dtype), zeros, matrix, spread / 2)


def _symmetric(
    weight: torch.Tensor, group_of: torch.Tensor, bits: int, dtype: torch.dtype
) -> _Ints:
    """Zeros in the middle of the values."""
    half, groups = 1 << (bits - 1), range(int(group_of.max()) + 1)
    tops = torch.stack([weight[:, group_of == group].abs().amax(1) for group in groups], 1)
    scales = (tops / (half - 1)).to(dtype)
    spread = scales.float()[:, group_of]
    centred = (weight / spread).round().clamp(-half, half - 1)
    zeros = torch.full(scales.shape, half, dtype=torch.int32)
    return _Ints(centred.int() + half, scales, zeros, centred * spread, spread / 2)


def _groups(weight: torch.Tensor, size: int, has_act_order: bool = False) -> torch.Tensor:
    """Of each column. size: -1 for one group; has_act_order: shuffled."""
    columns = weight.shape[1]
    group_of = torch.arange(columns) // (columns if size == -1 else size)
    if not has_act_order:
        return group_of
    return group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]


def awq(size: int) -> Quantiser:
    def quantise(weight: torch.Tensor) -> Quantised:
        ints = _ints(weight, _groups(weight, size), 4, torch.float16)
        tensors = {
            "qweight": _pack(ints.values.T, 4, AWQ_ORDER),
            "qzeros": _pack(ints.zeros.T, 4, AWQ_ORDER),
            "scales": ints.scales.T.contiguous(),
        }
        return Quantised(tensors, ints.matrix, ints.bound)

    return quantise


def gptq(size: int, has_act_order: bool, bits: int = 4, zero_offset: int = 1) -> Quantiser:
    """zero_offset: what stored zeros lack: 1 in the first version, 0 in the second."""

    def quantise(weight: torch.Tensor) -> Quantised:
        group_of = _groups(weight, size, has_act_order)
        ints = _ints(weight, group_of, bits, torch.float16)
        tensors = {
            "qweight": _pack(ints.values, bits).T.contiguous(),
            "qzeros": _pack(ints.zeros.T - zero_offset, bits),
            "scales": ints.scales.T.contiguous(),
            "g_idx": group_of.int(),
        }
        return Quantised(tensors, ints.matrix, ints.bound)

    return quantise


def packed(
    size: int, bits: int = 4, is_symmetric: bool = False, has_act_order: bool = False
) -> Quantiser:
    """Of compressed-tensors; with zeros unless is_symmetric."""
    rounded = _symmetric if is_symmetric else _ints

    def quantise(weight: torch.Tensor) -> Quantised:
        group_of = _groups(weight, size, has_act_order)
        ints = rounded(weight, group_of, bits, torch.bfloat16)
        tensors = {
            "weight_packed": _pack(ints.values, bits),
            "weight_scale": ints.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = _pack(ints.zeros.T, bits).T.contiguous()
        if has_act_order:
            tensors["weight_g_idx"] = group_of.int()
        return Quantised(tensors, ints.matrix, ints.bound)

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
