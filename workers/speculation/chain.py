"""Drafts one behind the other: those up to the first wrong one hold."""

import numpy as np
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
    """As ChainVerifier, of tensors on the CPU: few numbers, for which each of torch's operations
    takes several times as long as one of numpy's."""

    def accept(
        self, token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
    ) -> torch.Tensor:
        """See Verifier."""
        is_wrong = np.ones(len(token_ids), dtype=np.bool_)
        is_wrong[:-1] = token_ids.numpy()[:-1] != input_ids.numpy()[1:]
        stops = np.cumsum(num_samples)
        # Behind a row's last sample there is no draft.
        is_wrong[stops - 1] = True
        ends = np.flatnonzero(is_wrong)
        firsts = ends[np.searchsorted(ends, stops - num_samples)]
        return torch.from_numpy(1 + firsts - (stops - num_samples))
