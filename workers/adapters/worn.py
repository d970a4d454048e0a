"""Which tokens of the step under way have which adapter, for layers that are called one by one.

A step in which no token has an adapter gives what the model gives, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.adapters.host import HostAdapter
from workers.adapters.slot_ranks import SlotRanks
from workers.parallel.group import TPGroup

Group = tuple[int, torch.Tensor]
"""A slot and the tokens of a step that have its adapter, int64 (m,)."""


@dataclass(slots=True)
class WornAdapters:
    """Of the step under way, by slot."""

    groups: Sequence[Group] = field(default=())


class Bank(Protocol):
    """The device slots of one site: the matrices of the adapters that steps may have. Slot 0 is no
    adapter's; its matrices are zeros. ranks: by what the site's parts are."""

    ranks: SlotRanks

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """The slot is this adapter's from the next step on."""

    def hook(self, worn: WornAdapters, tp: TPGroup) -> None:
        """From now on the model's layer adds what worn says, where it is called by itself."""
