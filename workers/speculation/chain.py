"""Drafts one behind the other: those up to the first wrong one hold."""

import numpy as np
import numpy.typing as npt
import torch

from workers.scheduler.plan import IntArray


class ChainVerifier:
    """Nothing waits for the device."""

    def accept(
        self, token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
    ) -> torch.Tensor:
        """See Verifier."""
        width = int(num_samples.max())
        if width == 1:
            return torch.ones(len(num_samples), dtype=torch.int64, device=token_ids.device)
        starts = np.cumsum(num_samples) - num_samples
        places = torch.from_numpy(starts[:, None] + np.arange(width)).to(token_ids.device)
        has_draft = torch.from_numpy(np.arange(1, width) < num_samples[:, None])
        last = len(token_ids) - 1
        drafts = input_ids[places[:, 1:].clamp(max=last)]
        is_right = token_ids[places[:, :-1].clamp(max=last)] == drafts
        is_right &= has_draft.to(token_ids.device)
        # A minimum, as a cumulated product takes ten times as long on the host.
        columns = torch.arange(width - 1, device=token_ids.device)
        return 1 + torch.where(is_right, width - 1, columns).amin(dim=1)


class HostChainVerifier:
    """See HostVerifier."""

    def accept(
        self, token_ids: IntArray, expected: IntArray, starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        # Of a row's samples the last is wrong at the latest.
        wrong = (token_ids != expected).nonzero()[0]
        run_lens: npt.NDArray[np.int64] = wrong[wrong.searchsorted(starts)] - starts + 1
        return run_lens
