"""States that stand before tokens, as a head reads them: where they lie, not copied."""

from typing import NamedTuple

import torch


class StatesBefore(NamedTuple):
    """states: (m, hidden_size), contiguous, of which rows int32 or int64 (n,) are those before n
    tokens; None: all, as they lie."""

    states: torch.Tensor
    rows: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        """(n, hidden_size)."""
        return self.states if self.rows is None else self.states.index_select(0, self.rows)
