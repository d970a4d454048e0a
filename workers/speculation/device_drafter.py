"""What a runner asks of a drafter on its device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from attention.forward_batch import ForwardBatch
from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_growth import TreeDrafter
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.step_trees import LinedUp, StepTrees


class DeviceDrafter(ChainDrafter, Protocol):
    """Makes drafts of the rows of one rank, and keeps what it needs of every token.

    What it keeps of a token that turns out to be wrong is written anew before it is read, so that
    it need not know what holds: the next plan's lengths say where to go on.
    """

    @property
    def reads_target(self) -> bool:
        """Whether behind needs what the target makes of a step's tokens."""
        ...

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        """Drafts of the step's runs."""
        ...

    def before(self, step: DrafterStep) -> None:
        """The drafts are named, the target has not run."""
        ...

    def behind(self, step: DrafterStep, taps: Sequence[torch.Tensor]) -> None:
        """The target has run. taps: what it handed over, each (num_tokens, its size)."""
        ...

    def behind_decode(self, batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        """As behind, of a target's step of one token a row, within the graph of that step: tensors
        of the batch are complete, rows that pad it are at position 0 and write to the dummy
        page. Of drafters that read the target."""
        ...


class DeviceTreeDrafter(DeviceDrafter, TreeDrafter, Protocol):
    """One whose drafts may be trees. It reads every token of a step with trees where it stands."""

    def line_up(self, trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        """The step is verified: what is kept of the tokens at lined.sources is to stand at targets,
        int64 (num_tokens,), the cache indices of the step's tokens."""
        ...
