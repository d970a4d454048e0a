"""What of a step's drafts holds. A variation is a file of its own."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.scheduler.plan import IntArray

NO_SAMPLE = -2
"""What no sample is: neither a token nor NAN_TOKEN."""


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


class HostVerifier(Protocol):
    """As Verifier, where the host has the samples: few numbers, for which each of torch's
    operations takes several times as long as one of numpy's."""

    def accept(
        self, token_ids: IntArray, expected: IntArray, starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """How many samples of each row hold, its first ones, one at least: int64 (n,).

        token_ids, expected: int32 (num samples,), what was sampled, and what it had to be for the
        next one of its row to hold: NO_SAMPLE for a row's last. starts: int64 (n,), the first
        sample of each row.
        """
        ...
