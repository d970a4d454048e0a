"""Adapters in a model whose layers are called one by one: each adds to what its layer gives.

A step in which no token has an adapter gives what the model gives, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workers.adapters.bank import Group, SiteBank
from workers.parallel.group import TPGroup


@dataclass(slots=True)
class WornAdapters:
    """Of the step under way, by slot."""

    groups: Sequence[Group] = field(default=())


def add_hooks(banks: Sequence[SiteBank], worn: WornAdapters, tp: TPGroup) -> None:
    """From now on the banks' layers add what worn says."""
    for bank in banks:
        sum_ranks = tp.all_reduce if bank.site.sums_ranks else _as_it_is
        bank.site.layer.register_forward_hook(_hook(bank, worn, sum_ranks))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hook(
    bank: SiteBank, worn: WornAdapters, sum_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]:
    def add(module: nn.Module, arguments: tuple[Any, ...], out: torch.Tensor) -> None:
        if worn.groups:
            bank.add_to(out, arguments[0], worn.groups, sum_ranks)

    return add
