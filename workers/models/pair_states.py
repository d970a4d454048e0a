"""States that stand before tokens, as a head reads them: where they lie, not copied."""

from typing import NamedTuple

import torch


class StatesBefore(NamedTuple):
    """states: (m, hidden_size), contiguous, of which rows int32 or int64 (n,) are those before n
    tokens."""

    states: torch.Tensor
    rows: torch.Tensor

    def gathered(self) -> torch.Tensor:
        """(n, hidden_size)."""
        return self.states.index_select(0, self.rows)
