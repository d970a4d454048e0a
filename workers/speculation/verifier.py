"""What of a step's drafts holds. A variation is a file of its own."""

from typing import Protocol

import torch

from workers.scheduler.plan import IntArray


class Verifier(Protocol):
    """Noise is a function of (seed, position, token): a draft is right exactly if it is what was
    drawn behind the token before it."""

    def accept(
        self, token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
    ) -> torch.Tensor:
        """How many samples of each row hold, its first ones, one at least: int64 (n,).

        token_ids, input_ids: int64 (sum of num_samples,), what was sampled, and what it was
        sampled behind, row after row. num_samples: host int32 (n,).
        """
        ...
