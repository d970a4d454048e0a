"""What a proposer is asked and told. Every variation is a file of its own (factory.py).

A proposer lives on every rank and proposes alike on all of them. It never changes a text: drafts
that are not what sampling draws are dropped (runs.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from workers.scheduler.plan import AdmittedRequest, IntArray


class Moved(NamedTuple):
    """Of a step with trees, int64 (num_tokens,) each: its new tokens row by row, in each those that
    hold first; the cache indices of these, and those to which their keys and values were brought,
    so that what holds stands one behind the other."""

    order: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows that want drafts, all arrays int32 (n,) on the host.

    lens: tokens known of each slot, the one sampled last included. max_drafts: at least 1.
    may_branch: bool (n,), which rows may have several drafts for one place; None: none.
    """

    slots: IntArray
    lens: IntArray
    max_drafts: IntArray
    may_branch: npt.NDArray[np.bool_] | None = None

    @property
    def width(self) -> int:
        return int(self.max_drafts.max())


@dataclass(frozen=True, slots=True)
class Drafts:
    """token_ids: int64 (n, width) on the device; what stands behind a row's num_drafts is any.

    num_drafts: host int32 (n,), at most max_drafts, 0 for a row of which nothing is known. parents:
    host int32 (n, width), what each draft stands behind: 0 for the token sampled last, i for the
    row's i-th draft, one before it. Drafts behind the same token differ. None: all drafts stand one
    behind the other.
    """

    token_ids: torch.Tensor
    num_drafts: IntArray
    parents: IntArray | None = None


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step of the target, verified.

    slots, prefix_lens: host int32 (bs,), of its rows. num_held: int64 (bs,), how many of each row's
    new tokens hold: all of a prompt's, of a run the token sampled last and the right drafts.
    next_ids: int64 (bs,), what was sampled behind the last of them, -1 where a prompt goes on.
    moved: None where the first new tokens of every row are those that hold.
    """

    slots: IntArray
    prefix_lens: IntArray
    num_held: torch.Tensor
    next_ids: torch.Tensor
    moved: Moved | None = None

    def without(self, slots: set[int]) -> Self:
        """The other slots' rows."""
        if not slots:
            return self
        kept = np.isin(self.slots, list(slots), invert=True)
        on_device = torch.from_numpy(kept).to(self.num_held.device)
        return type(self)(
            self.slots[kept],
            self.prefix_lens[kept],
            self.num_held[on_device],
            self.next_ids[on_device],
            self.moved,
        )


class Proposer(Protocol):
    """Drafts for the slots of one rank."""

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """These take their slots over; TokenHistory still has what stood there. May come again for
        a step that is launched again."""
        ...

    def propose(self, rows: DraftRows) -> Drafts:
        """What may follow. Called before the target's pass, again where that is launched again."""
        ...

    def observe(self, step: ObservedStep) -> None:
        """Called once for every step, those without drafts and of prompts included, in order; a
        step that runs in pieces is as many steps."""
        ...
