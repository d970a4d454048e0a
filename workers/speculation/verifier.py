"""What of a step's drafts holds. A variation is a file of its own."""

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.scheduler.plan import IntArray


@dataclass(frozen=True, slots=True)
class Accepted:
    """run_lens: int64 (n,), how many samples of each sampling row hold, one at least. kept: int64
    (n, width), the samples of each row that hold, by their number in the row, in the order of the
    text; what stands behind a row's run_lens is any. None where they are the row's first ones."""

    run_lens: torch.Tensor
    kept: torch.Tensor | None = None


class Verifier(Protocol):
    """Noise is a function of (seed, position, token): a draft is right exactly if it is what was
    drawn behind the token before it."""

    def accept(
        self, token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
    ) -> Accepted:
        """token_ids, input_ids: int64 (sum of num_samples,), what was sampled, and what it was
        sampled behind, row after row. num_samples: host int32 (n,)."""
        ...
