"""Log probabilities as they cross the engine's border: of a token, and of a whole prompt.

A prompt's are arrays instead of a million objects.

A frame with them costs its reader a copy of their bytes; what an entry is, is worked out where and
when somebody looks. Knows no torch.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

_FLOAT, _INT = np.dtype("<f4"), np.dtype("<i4")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position: the token that stands there and the top ones."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """n positions in order, with num_top alternatives each.

    logprobs: float32 (n,). ranks: int32 (n,). top_token_ids: int32 (n, num_top), top_logprobs:
    float32 (n, num_top). All little-endian and contiguous.
    """

    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.logprobs) // _FLOAT.itemsize

    def unpack(self, start: int = 0, stop: int | None = None) -> list[TokenLogprobs]:
        """The entries of positions start to stop. Raises ValueError if the arrays do not fit."""
        shape = (len(self), self.num_top)
        span = slice(start, stop)
        return [
            TokenLogprobs(*entry)
            for entry in zip(
                np.frombuffer(self.logprobs, _FLOAT)[span].tolist(),
                np.frombuffer(self.ranks, _INT)[span].tolist(),
                np.frombuffer(self.top_token_ids, _INT).reshape(shape)[span].tolist(),
                np.frombuffer(self.top_logprobs, _FLOAT).reshape(shape)[span].tolist(),
                strict=True,
            )
        ]


NO_LOGPROBS = PackedLogprobs(0, b"", b"", b"", b"")


def join_logprobs(parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
    """Positions of all parts in order; parts with any ask for one number of alternatives."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else NO_LOGPROBS
    return PackedLogprobs(
        parts[0].num_top,
        b"".join(part.logprobs for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.top_token_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
    )
