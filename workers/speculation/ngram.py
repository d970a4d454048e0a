"""Drafts by prompt lookup: what followed the latest earlier place that ends like the text so far.

After "Prompt Lookup Decoding" (Saxena, 2023). Edits, quotes and code repeat their prompt; where
nothing repeats, drafts are wrong, and verification drops them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from workers.scheduler.plan import AdmittedRequest, IntArray
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.suffix import longest_match

MAX_NGRAM = 3
"""Places are compared by so many tokens; one that has more of them in common wins."""


class NgramProposer:
    """On the host, row by row: a scan of thousands of tokens takes microseconds."""

    def __init__(self, history: TokenHistory) -> None:
        """history: on the CPU."""
        self._history: IntArray = history.token_ids.numpy()

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """The history has all there is to know."""

    def observe(self, step: ObservedStep) -> None:
        """The history has all there is to know."""

    def propose(self, rows: DraftRows) -> Drafts:
        """Every row has drafts: where no place ends alike, they are the beginning of the text."""
        token_ids = np.empty((len(rows.slots), rows.width), dtype=np.int64)
        columns = np.arange(rows.width)
        for row, (slot, length) in enumerate(
            zip(rows.slots.tolist(), rows.lens.tolist(), strict=True)
        ):
            known = self._history[slot, :length]
            start = _best_end(known) + 1
            # A place near the end is followed by less than is wanted: it repeats itself.
            token_ids[row] = known[start + columns % (length - start)]
        return Drafts(torch.from_numpy(token_ids), rows.max_drafts)


def _best_end(known: IntArray) -> int:
    """Where the place ends that has the most of the last tokens in common, the latest of several;
    -1 for none."""
    ends, num_alike = longest_match(known[:-1], known[: -MAX_NGRAM - 1 : -1])
    return int(ends[-1]) if num_alike else -1
