"""Drafts that ranks make on their devices, as the host that plans steps sees them: not at all."""

from collections.abc import Sequence

import torch

from workers.scheduler.plan import DRAFT_TOKEN, AdmittedRequest
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep


class RankProposer:
    """Leaves every draft to the rank that runs the step: DRAFT_TOKEN stays where one is to be."""

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Ranks are told by the plan."""

    def propose(self, rows: DraftRows) -> Drafts:
        """As many as there may be."""
        token_ids = torch.full((len(rows.slots), rows.width), DRAFT_TOKEN, dtype=torch.int64)
        return Drafts(token_ids, rows.max_drafts)

    def observe(self, step: ObservedStep) -> None:
        """Ranks are told by the lengths of the next plan."""
