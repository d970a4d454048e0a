"""Weights of four bits with a scale and a zero a group, of random values."""

import torch

from workers.layers.formats.grouped import GroupedWeight
from workers.layers.kept.int4 import Int4Groups


def int4_weight(
    rows,
    columns,
    group_size=128,
    has_order=False,
    has_half_scales=True,
    is_symmetric=False,
    device="cpu",
):
    """has_order: each column is of some group. has_half_scales: scales are numbers of 16 bits."""
    groups = torch.arange(columns, device=device) // group_size
    shape = rows, columns // group_size
    scales = torch.rand(shape, device=device) * 0.01
    zeros = (8, 9) if is_symmetric else (0, 17)
    return GroupedWeight(
        torch.randint(0, 16, (rows, columns), dtype=torch.int32, device=device),
        scales.half().float() if has_half_scales else scales,
        torch.randint(*zeros, shape, dtype=torch.int32, device=device),
        groups[torch.randperm(columns, device=device)] if has_order else groups,
    )


def kept_of(weight):
    return Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)
