"""The device slots of one layer's experts. Slot 0 is no adapter's; its matrices are zeros."""

from collections.abc import Sequence
from functools import partial

import torch

from workers.adapters.expert_hooks import AddedToExperts
from workers.adapters.expert_site import PARTS, ExpertsSite
from workers.adapters.host import HostAdapter
from workers.adapters.slot_ranks import SlotRanks
from workers.adapters.worn import Group, WornAdapters
from workers.parallel.group import TPGroup


class ExpertBank:
    """By the places of experts on this rank. gate_up_a (num_slots + 1, places, 2 * max_rank,
    hidden_size): rows for gate, then for up; gate_up_b (num_slots + 1, places, 2 * columns,
    max_rank): gate over up; down_a (num_slots + 1, places, max_rank, columns); down_b (num_slots +
    1, places, hidden_size, max_rank); zeros beyond an adapter's own ranks. ranks: of PARTS, the
    highest of any expert."""

    def __init__(
        self,
        site: ExpertsSite,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.site, self.max_rank = site, max_rank
        share, hidden = site.experts.share, site.names.hidden_size
        slots = num_slots + 1, share.num_kept

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros((*slots, *size), dtype=dtype, device=device)

        self.gate_up_a = zeros(2 * max_rank, hidden)
        self.gate_up_b = zeros(2 * share.num_columns, max_rank)
        self.down_a = zeros(max_rank, share.num_columns)
        self.down_b = zeros(hidden, max_rank)
        self.ranks = SlotRanks(num_slots, len(PARTS), device)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """The slot is this adapter's from the next step on."""
        for matrices in (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b):
            matrices[slot].zero_()
        stacks = [adapter.pairs.get(self.site.key(part)) for part in PARTS]
        for index, stack in enumerate(stacks):
            if stack is not None:
                a, b = self._matrices(slot, index)
                a[:, : stack.rank].copy_(stack.a, non_blocking=True)
                b[:, :, : stack.rank].copy_(stack.b, non_blocking=True)
        self.ranks.set(slot, [0 if stack is None else stack.rank for stack in stacks])

    def hook(self, worn: WornAdapters, tp: TPGroup) -> None:
        """As Bank. Each rank adds what its columns of A and all of B make of its own inputs."""
        self.site.experts.wrap_products(partial(AddedToExperts, add_to=self.add_to, worn=worn))

    def _matrices(self, slot: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one of PARTS: (places, max_rank, inputs), (places, outputs, max_rank)."""
        if part == 2:
            return self.down_a[slot], self.down_b[slot]
        first, columns = part * self.max_rank, self.gate_up_b.shape[2] // 2
        a = self.gate_up_a[slot, :, first : first + self.max_rank]
        return a, self.gate_up_b[slot, :, part * columns : (part + 1) * columns]

    def add_to(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        tokens: torch.Tensor,
        place: int,
        parts: range,
        groups: Sequence[Group],
    ) -> None:
        """out (m, outputs of parts) += what each group's adapter makes of x (m, inputs), rows of
        these tokens at the expert of that place. parts: of PARTS."""
        for slot, own in groups:
            rows = torch.isin(tokens, own).nonzero().flatten()
            for part, target in zip(parts, out.chunk(len(parts), dim=-1), strict=True):
                rank = self.ranks.of(slot)[part]
                if rank and len(rows):
                    a, b = self._matrices(slot, part)
                    shrunk = x[rows] @ a[place, :rank].T
                    target.index_add_(0, rows, shrunk @ b[place, :, :rank].T)
