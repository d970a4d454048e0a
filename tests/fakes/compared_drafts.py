"""Drafts made ahead, beside those that the same graphs make once the host knows all lengths."""

from typing import Any

import pytest
import torch

from workers.runner.ahead_drafts import AheadDrafts
from workers.speculation.device_step import DrafterStep
from workers.speculation.draft_mailbox import SentDrafts


class ComparedDrafts:
    """Of one rank, from its engine's start on. num_equal: steps whose drafts were made ahead."""

    def __init__(self, rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_equal = 0
        take = AheadDrafts.take

        def compared(own: AheadDrafts, step: DrafterStep) -> SentDrafts | None:
            found = take(own, step)
            if found is not None:
                again = rank._draft_graphs.run(step)
                for own, other in zip(found.drafts, again, strict=True):
                    assert own is other or torch.equal(own, other)
                self.num_equal += 1
            return found

        monkeypatch.setattr(AheadDrafts, "take", compared)
