"""Drafts by prompt lookup: what followed the latest earlier place that ends like the text so far.

After "Prompt Lookup Decoding" (Saxena, 2023). Edits, quotes and code repeat their prompt; where
nothing repeats, drafts are wrong, and verification drops them.
"""

from collections.abc import Sequence

import torch

from workers.scheduler.plan import AdmittedRequest, IntArray

MAX_NGRAM = 3
"""Places are compared by so many tokens; one that has more of them in common wins."""


class NgramProposer:
    """Knows the tokens of every slot. All tensors are on one device; nothing waits for it."""

    def __init__(self, num_slots: int, max_context_len: int, device: torch.device) -> None:
        self._history = torch.zeros(num_slots, max_context_len, dtype=torch.int32, device=device)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Take over the slots of requests with their known_ids."""
        for request in requests:
            known = torch.from_numpy(request.known_ids.copy())
            self._history[request.slot, : len(known)] = known.to(self._history.device)

    def extend(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Token ids that stand at positions of slots, all int64 (n,)."""
        self._history[slots, positions] = token_ids.int()

    def propose(self, slots: IntArray, lens: IntArray, num_drafts: int) -> torch.Tensor:
        """What may follow the first lens (n,) tokens of slots (n,): int64 (n, num_drafts).

        Every row has drafts: where no place ends alike, they are the beginning of the text.
        """
        width = int(lens.max())
        device = self._history.device
        rows = torch.from_numpy(slots.astype("int64")).to(device)
        history = self._history[rows, :width]
        last = torch.from_numpy(lens.astype("int64")).to(device).unsqueeze(1) - 1
        ends = self._best_ends(history, last)
        # A place near the end is followed by less than is wanted: it repeats itself.
        steps = torch.arange(num_drafts, device=device) % (last - ends)
        return history.gather(1, ends + 1 + steps).long()

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
