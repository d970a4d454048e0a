"""Drafts by prompt lookup: what followed the latest earlier place that ends like the text so far.

After "Prompt Lookup Decoding" (Saxena, 2023). Edits, quotes and code repeat their prompt; where
nothing repeats, drafts are wrong, and verification drops them.
"""

from collections.abc import Sequence

import torch

from workers.scheduler.plan import AdmittedRequest
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep

MAX_NGRAM = 3
"""Places are compared by so many tokens; one that has more of them in common wins."""


class NgramProposer:
    """Reads the history of every slot. All tensors are on one device; nothing waits for it."""

    def __init__(self, history: TokenHistory) -> None:
        self._history = history

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """The history has all there is to know."""

    def observe(self, step: ObservedStep) -> None:
        """The history has all there is to know."""

    def propose(self, rows: DraftRows) -> Drafts:
        """Every row has drafts: where no place ends alike, they are the beginning of the text."""
        width = int(rows.lens.max())
        device = self._history.token_ids.device
        slots = torch.from_numpy(rows.slots.astype("int64")).to(device)
        history = self._history.token_ids[slots, :width]
        last = torch.from_numpy(rows.lens.astype("int64")).to(device).unsqueeze(1) - 1
        ends = self._best_ends(history, last)
        # A place near the end is followed by less than is wanted: it repeats itself.
        steps = torch.arange(rows.width, device=device) % (last - ends)
        return Drafts(history.gather(1, ends + 1 + steps).long(), rows.max_drafts)

    def _best_ends(self, history: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Where the place ends that has the most of the last tokens in common, the latest of
        several: int64 (n, 1), -1 for none. history (n, width), last (n, 1): index of the last."""
        positions = torch.arange(history.shape[1], device=history.device)
        is_alike = positions < last
        num_alike = torch.zeros_like(history, dtype=torch.int64)
        for distance in range(min(MAX_NGRAM, history.shape[1])):
            tail = history.gather(1, (last - distance).clamp(min=0))
            shifted = torch.roll(history, distance, dims=1)
            inside = (positions >= distance) & (last >= distance)
            is_alike = is_alike & inside & (shifted == tail)
            num_alike += is_alike
        best = (num_alike * history.shape[1] + positions * (num_alike > 0)).argmax(1, keepdim=True)
        return torch.where(num_alike.gather(1, best) > 0, best, -torch.ones_like(best))
