"""The device slots of a model's embedding. Slot 0 is no adapter's; its matrices are zeros."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workers.adapters.embedding_site import EmbeddingSite
from workers.adapters.host import HostAdapter
from workers.adapters.slot_ranks import SlotRanks
from workers.adapters.worn import Group, WornAdapters
from workers.parallel.group import TPGroup


class EmbeddingBank:
    """a (num_slots + 1, vocab_size, max_rank): a token's column of A as a row. b (num_slots + 1,
    hidden_size, max_rank); zeros beyond an adapter's own rank."""

    def __init__(
        self,
        site: EmbeddingSite,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.site = site
        vocab_size, hidden_size = site.modules[site.path]
        self.a = torch.zeros((num_slots + 1, vocab_size, max_rank), dtype=dtype, device=device)
        self.b = torch.zeros((num_slots + 1, hidden_size, max_rank), dtype=dtype, device=device)
        self.ranks = SlotRanks(num_slots, 1, device)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """The slot is this adapter's from the next step on."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        pair = adapter.pairs.get(self.site.path)
        if pair is not None:
            self.a[slot, :, : pair.rank].copy_(pair.a.T, non_blocking=True)
            self.b[slot, :, : pair.rank].copy_(pair.b, non_blocking=True)
        self.ranks.set(slot, [0 if pair is None else pair.rank])

    def hook(self, worn: WornAdapters, tp: TPGroup) -> None:
        """As Bank. Ranks have summed up by then, and add the same."""

        def add(module: nn.Module, arguments: tuple[Any, ...], out: torch.Tensor) -> None:
            if worn.groups:
                self.add_to(out, arguments[0], worn.groups)

        self.site.layer.register_forward_hook(add)

    def add_to(self, out: torch.Tensor, ids: torch.Tensor, groups: Sequence[Group]) -> None:
        """out (n, hidden_size) += what each group's adapter adds to its tokens. ids: int64 (n,)."""
        for slot, tokens in groups:
            (rank,) = self.ranks.of(slot)
            if rank:
                shrunk = self.a[slot, ids[tokens], :rank]
                out.index_add_(0, tokens, shrunk @ self.b[slot, :, :rank].T)
