"""Greedy chains of drafts on a rank's device: one pass of a drafter a draft, one after another."""

from typing import Protocol

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.sampling.transfer import upload
from workers.speculation.device_pass import DevicePasses, PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep


class ChainDrafter(Protocol):
    """What is the same in every pass of a drafter.

    backend: over a pool with the target's cache indices. first_position: the text's position that
    it counts as 0. reads_last: whether it has to read a row's last draft, too.
    """

    @property
    def backend(self) -> AttentionBackend: ...
    @property
    def first_position(self) -> int: ...
    @property
    def reads_last(self) -> bool: ...

    def capture_obstacle(self, max_context_len: int) -> str:
        """As CausalLM.capture_obstacle, of a pass."""
        ...

    def carried_to(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens of slots at positions as the drafter counts them, int64 (n,) both, which the first
        pass reads -> what is handed to it, (n, size), of size 0 for nothing. A graph can have
        it."""
        ...

    def draft(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row, int64 (n,), and what the pass before handed over -> what is likeliest to
        follow, and what is handed on."""
        ...

    def read(self, ids: torch.Tensor, batch: ForwardBatch) -> None:
        """As draft, of tokens of which nobody asks what follows."""
        ...


def draft_chains(drafter: ChainDrafter, passes: DevicePasses, step: DrafterStep) -> DeviceDrafts:
    """Drafts of the step's runs. A row reads as many tokens as it drafts."""
    runs, device = step.runs, step.ids.device
    drafts = torch.zeros(len(runs), runs.width, dtype=torch.int64, device=device)
    (firsts,) = upload([runs.firsts], device)
    step.place_tokens()
    slots, places = (own.index_select(0, firsts) for own in (step.token_slots, step.places))
    ids = step.ids.index_select(0, firsts)
    carried = drafter.carried_to(slots, places - drafter.first_position)
    for column in range(runs.width):
        wanting = np.flatnonzero(runs.num_drafts > column)
        (index,) = upload([wanting], device)
        rows = PassRows(
            runs.slots[wanting],
            runs.prefix_lens[wanting] + np.int32(column - drafter.first_position),
            np.ones(len(wanting), dtype=np.int32),
            step.plan.out_cache_loc[runs.firsts[wanting] + column],
        )
        own = ids.index_select(0, index)
        batch = passes.prepare(rows, own)
        likeliest, made = drafter.draft(own, carried.index_select(0, index), batch)
        ids = ids.index_copy(0, index, likeliest)
        carried = carried.index_copy(0, index, made)
        drafts[:, column] = ids
    return DeviceDrafts(drafts)
