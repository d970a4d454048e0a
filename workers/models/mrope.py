"""Positions of three rows: where a multimodal rotary embedding (M-RoPE) places tokens.

Text counts on in all three rows alike. A part of an image stands at the image's first position,
plus its row of the image in the second and its column in the third; what follows goes on behind the
larger of both extents (Wang et al., "Qwen2-VL", 2024, section 2.1). So an image takes fewer
positions than tokens, and a token's position is no longer its place. On the host, in numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.scheduler.media_plan import PlacedMedia

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Of one sequence. known: int64 (3, n), of its first n tokens. delta: token i behind these
    stands at i + delta in every row."""

    known: Positions
    delta: int

    def of_tokens(self, start: int, stop: int) -> Positions:
        """Of tokens start .. stop - 1, int64 (3, stop - start)."""
        behind = np.arange(max(start, self.known.shape[1]), stop, dtype=np.int64) + self.delta
        own = self.known[:, start:stop]
        return np.concatenate([own, np.broadcast_to(behind, (3, len(behind)))], axis=1)


def mrope_positions(spans: Sequence[PlacedMedia], merge_size: int) -> RotaryPositions:
    """spans: the images of one prompt, in order. merge_size: patches of a placeholder in either
    direction."""
    parts: list[Positions] = []
    num_tokens = position = 0
    for span in spans:
        text = np.arange(span.start - num_tokens, dtype=np.int64) + position
        position += len(text)
        rows, columns = np.indices(
            (span.grid_height // merge_size, span.grid_width // merge_size), dtype=np.int64
        ).reshape(2, -1)
        parts += [np.tile(text, (3, 1)), np.stack([np.zeros_like(rows), rows, columns]) + position]
        position += max(span.grid_height, span.grid_width) // merge_size
        num_tokens = span.stop
    known = np.concatenate([np.empty((3, 0), dtype=np.int64), *parts], axis=1)
    return RotaryPositions(known, position - num_tokens)
