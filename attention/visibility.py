"""Which keys a query sees, over arrays of positions: what kernels and cost models plan with."""

import numpy as np
import numpy.typing as npt

from attention.memory.layout import CurrentChunk, EveryToken, LastTokens, Retention

Positions = npt.NDArray[np.int64]


def first_visible(retention: Retention, positions: Positions) -> Positions:
    """Retention.first_visible of every position: the first key that a query there sees."""
    match retention:
        case EveryToken():
            return np.zeros_like(positions)
        case LastTokens(num_tokens):
            return np.maximum(positions - (num_tokens - 1), 0)
        case CurrentChunk(num_tokens):
            return positions - positions % num_tokens
