"""What a runner asks of a drafter on its device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_step import DrafterStep


class DeviceDrafter(ChainDrafter, Protocol):
    """Makes drafts of the rows of one rank, and keeps what it needs of every token.

    What it keeps of a token that turns out to be wrong is written anew before it is read, so that
    it need not know what holds: the next plan's lengths say where to go on.
    """

    @property
    def reads_target(self) -> bool:
        """Whether behind needs what the target makes of a step's tokens."""
        ...

    def propose(self, step: DrafterStep) -> torch.Tensor:
        """Drafts of the step's runs, int64 (len(runs), width)."""
        ...

    def before(self, step: DrafterStep) -> None:
        """The drafts are named, the target has not run."""
        ...

    def behind(self, step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        """The target has run. taps: what it handed over, each (num_tokens, its size)."""
        ...
