"""An image as bytes: an eighth of its patches in float32, whose two frames are alike."""

import msgspec
import numpy as np
import numpy.typing as npt

NUM_LEVELS = 256
"""Values that a byte has."""
_LEVEL = np.dtype("<f4")


class ImagePixels(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pixels", tag_field="kind"
):
    """As ImagePatches, but what the model is given stands in a table.

    num_frames: how often a patch repeats each colour's values. levels: float32, little-endian,
    (colours, NUM_LEVELS), what a byte of a colour means. values: bytes, (grid_height * grid_width,
    colours, pixels of a patch).
    """

    digest: bytes
    grid_height: int
    grid_width: int
    num_frames: int
    levels: bytes
    values: bytes

    @property
    def num_patches(self) -> int:
        return self.grid_height * self.grid_width

    def num_bytes_for(self, values_per_patch: int) -> int:
        """What values has to have where a model's patches have that many; -1: none will do."""
        row_bytes = NUM_LEVELS * _LEVEL.itemsize
        if self.num_frames < 1 or not self.levels or len(self.levels) % row_bytes:
            return -1
        num_colours = len(self.levels) // row_bytes
        if values_per_patch % (self.num_frames * num_colours):
            return -1
        return self.num_patches * values_per_patch // self.num_frames

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self._levels).all())

    @property
    def patches(self) -> npt.NDArray[np.float32]:
        """float32 (num_patches, values of a patch)."""
        levels = self._levels
        values = np.frombuffer(self.values, dtype=np.uint8)
        by_colour = values.reshape(self.num_patches, len(levels), 1, -1)
        shape = (*by_colour.shape[:2], self.num_frames, by_colour.shape[-1])
        colours = np.arange(len(levels)).reshape(1, -1, 1, 1)
        given = np.broadcast_to(levels[colours, by_colour], shape)
        return given.reshape(self.num_patches, -1)

    @property
    def _levels(self) -> npt.NDArray[np.float32]:
        table = np.frombuffer(self.levels, dtype=_LEVEL).astype(np.float32, copy=False)
        return table.reshape(-1, NUM_LEVELS)
