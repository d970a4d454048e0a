"""The device slots of one site: the matrices of the adapters that steps may have.

Slot 0 is no adapter's; its matrices are zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workers.adapters.host import HostAdapter
from workers.adapters.sites import Site
from workers.adapters.slot_ranks import SlotRanks
from workers.adapters.worn import Group, WornAdapters
from workers.parallel.group import TPGroup


class SiteBank:
    """a (num_slots + 1, parts * max_rank, num_inputs): of each part max_rank rows, the adapter's
    own first and then zeros. b (num_slots + 1, num_outputs, max_rank): a part's rows take what its
    rows of a gave."""

    def __init__(
        self,
        site: Site,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.site = site
        self.max_rank = max_rank
        rows = len(site.parts) * max_rank
        self.a = torch.zeros((num_slots + 1, rows, site.num_inputs), dtype=dtype, device=device)
        self.b = torch.zeros(
            (num_slots + 1, site.num_outputs, max_rank), dtype=dtype, device=device
        )
        self.ranks = SlotRanks(num_slots, len(site.parts), device)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """The slot is this adapter's from the next step on."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        pairs = [adapter.pairs.get(part.module) for part in self.site.parts]
        for index, (part, pair) in enumerate(zip(self.site.parts, pairs, strict=True)):
            if pair is not None:
                first = index * self.max_rank
                self.a[slot, first : first + pair.rank].copy_(pair.a, non_blocking=True)
                self.b[slot, part.rows, : pair.rank].copy_(pair.b, non_blocking=True)
        self.ranks.set(slot, [0 if pair is None else pair.rank for pair in pairs])

    def hook(self, worn: WornAdapters, tp: TPGroup) -> None:
        """As Bank."""
        sum_ranks = tp.all_reduce if self.site.sums_ranks else _as_it_is

        def add(module: nn.Module, arguments: tuple[Any, ...], out: torch.Tensor) -> None:
            if worn.groups:
                self.add_to(out, arguments[0], worn.groups, sum_ranks)

        self.site.layer.register_forward_hook(add)

    def add_to(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        groups: Sequence[Group],
        sum_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """out (n, num_outputs) += what each group's adapter makes of its tokens of x (n,
        num_inputs). sum_ranks: of what ranks made of their own inputs."""
        for slot, tokens in groups:
            own = x.index_select(0, tokens)
            for index, part in enumerate(self.site.parts):
                rank = self.ranks.of(slot)[index]
                if not rank:
                    continue
                first = index * self.max_rank
                shrunk = sum_ranks(own @ self.a[slot, first : first + rank].T)
                delta = shrunk @ self.b[slot, part.rows, :rank].T
                out[:, part.rows].index_add_(0, tokens, delta)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
