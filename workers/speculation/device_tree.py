"""Trees of drafts that grow on a rank's device, of one shape in all rows.

As GrowingTree, whose choice this is: of all continuations of a depth's drafts the likeliest,
together with the drafts before them (EAGLE-2, Li et al., 2024). How many stand at a depth is a
constant, and so are positions; which token each stands behind is not: parents and masks are
tensors. Operations depend on shapes alone, so that a graph can hold them. Nothing here waits for
the device.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """Of n rows, each with m tokens so far, the root and its drafts level by level.

    ids: int64 (n, m). parents: int64 (n, m), which of the row's tokens each stands behind, 0 of a
    root. logprobs: float64 (n, m), of each with all before it. sees: bool (n, m, m), which of the
    row's tokens each sees: those before it on its path, and itself. num_newest: of the last level.
    """

    ids: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor
    sees: torch.Tensor
    num_newest: int

    @classmethod
    def of_roots(cls, roots: torch.Tensor) -> Self:
        """roots: int64 (n,), their token ids."""
        num_rows, device = len(roots), roots.device
        parents = torch.zeros((num_rows, 1), dtype=torch.int64, device=device)
        logprobs = torch.zeros((num_rows, 1), dtype=torch.float64, device=device)
        sees = torch.ones((num_rows, 1, 1), dtype=torch.bool, device=device)
        return cls(roots.unsqueeze(1), parents, logprobs, sees, 1)

    @property
    def token_ids(self) -> torch.Tensor:
        """Of drafts, int64 (n, m - 1), a view."""
        return self.ids[:, 1:]

    def grown(
        self,
        logits: torch.Tensor,
        width: int,
        names: torch.Tensor | None = None,
        num_parents: torch.Tensor | None = None,
    ) -> "DeviceTrees":
        """With a level of width drafts more. logits: behind the newest tokens of each row, float
        (n * num_newest, vocab); width: at most as many as these name. names: int64 (vocab,),
        token ids of columns of logits; None: they are. num_parents: int64 (n,), how many of a row's
        newest tokens, the first, others may stand behind; None: all. Where none may, a row's drafts
        are any."""
        n, num_tokens = self.parents.shape
        own = logits.float()
        values, columns = own.topk(min(width, own.shape[1]))
        logprobs = values.double() - own.logsumexp(dim=-1, keepdim=True).double()
        before = self.logprobs[:, -self.num_newest :].unsqueeze(2)
        joint = before + logprobs.view(n, self.num_newest, -1)
        if num_parents is not None:
            newest = torch.arange(self.num_newest, device=joint.device)
            is_barren = newest >= num_parents.unsqueeze(1)
            # Behind all others, those of logits that are no number as well.
            joint = joint.nan_to_num(-torch.inf, torch.inf, -torch.inf)
            joint = joint.masked_fill(is_barren.unsqueeze(2), torch.nan)
        joint = joint.flatten(1)
        # No number comes last, as on the host.
        ascending, order = torch.sort(-joint, dim=1, stable=True)
        best = order[:, :width]
        parents = num_tokens - self.num_newest + best // values.shape[1]
        column = columns.view(n, -1).gather(1, best)
        token_ids = column if names is None else names[column]
        return DeviceTrees(
            torch.cat([self.ids, token_ids], dim=1),
            torch.cat([self.parents, parents], dim=1),
            torch.cat([self.logprobs, -ascending[:, :width]], dim=1),
            self._seen_with(parents),
            best.shape[1],
        )

    def _seen_with(self, parents: torch.Tensor) -> torch.Tensor:
        """parents: int64 (n, width), of a level behind the tokens so far."""
        n, num_tokens = self.parents.shape
        width = parents.shape[1]
        paths = self.sees.gather(1, parents.unsqueeze(2).expand(-1, -1, num_tokens))
        itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(n, -1, -1)
        unseen = self.sees.new_zeros((n, num_tokens, width))
        old, new = torch.cat([self.sees, unseen], dim=2), torch.cat([paths, itself], dim=2)
        return torch.cat([old, new], dim=1)
