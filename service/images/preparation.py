"""Pixels to patches, value for value what transformers' image processor of Qwen2-VL makes of them.

Written here because that one imports torch, which a tokenizer process has no other use for. The
algorithm is that of "Qwen2-VL" (Wang et al., 2024): sides become multiples of a merged square, with
the number of pixels in a range and the aspect ratio kept as far as that allows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from service.images.errors import ImageRefusedError
from workers.engine.content import DIGEST_BYTES
from workers.engine.pixels import NUM_LEVELS, ImagePixels
from workers.errors import ModelLoadError

_MAX_ASPECT_RATIO = 200
_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a preprocessor_config.json says.

    patch_size: pixels of a patch in either direction. merge_size: patches of a placeholder in
    either direction. num_frames: how often a patch holds the same image. min_pixels, max_pixels: of
    a prepared image. levels: float32 (3, NUM_LEVELS), what the model is given for each value of
    each colour.
    """

    patch_size: int
    merge_size: int
    num_frames: int
    min_pixels: int
    max_pixels: int
    resample: Image.Resampling
    levels: npt.NDArray[np.float32]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Preparation":
        """Raises ModelLoadError for what is not done here."""
        try:
            return cls._of(config)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"the folder's image processor cannot be used: {error}") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> "Preparation":
        for name in _SWITCHES:
            if not config.get(name, True):
                raise ValueError(f"{name} is off, which is not supported")
        size = {**_DEFAULT_SIZE, **(config.get("size") or {})}
        low, high = config.get("min_pixels"), config.get("max_pixels")
        sizes = {
            name: int(config.get(name, default))
            for name, default in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
        }
        if min(sizes.values()) < 1:
            raise ValueError("sizes must be at least 1")
        return cls(
            patch_size=sizes["patch_size"],
            merge_size=sizes["merge_size"],
            num_frames=sizes["temporal_patch_size"],
            min_pixels=int(size["shortest_edge"] if low is None else low),
            max_pixels=int(size["longest_edge"] if high is None else high),
            resample=Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
            levels=_levels(
                float(config.get("rescale_factor", 1 / 255)),
                config.get("image_mean", _CLIP_MEAN),
                config.get("image_std", _CLIP_STD),
            ),
        )

    @property
    def square(self) -> int:
        """Pixels of a placeholder in either direction."""
        return self.patch_size * self.merge_size

    def size_of(self, width: int, height: int, max_pixels: int) -> tuple[int, int]:
        """Width and height as prepared. max_pixels: where it is less than the model's own.

        Raises ImageRefusedError for an image that is far longer than wide, or wider than long."""
        longer, shorter = max(width, height), min(width, height)
        if longer > _MAX_ASPECT_RATIO * shorter:
            raise ImageRefusedError(
                f"one side of the image is more than {_MAX_ASPECT_RATIO} times the other"
            )
        square = self.square
        most = max(min(self.max_pixels, max_pixels), square * square)
        least = min(self.min_pixels, most)
        rounded = [round(side / square) * square for side in (width, height)]
        if rounded[0] * rounded[1] > most:
            scale = math.sqrt(width * height / most)
            rounded = [
                max(square, math.floor(side / scale / square) * square) for side in (width, height)
            ]
        elif rounded[0] * rounded[1] < least:
            scale = math.sqrt(least / (width * height))
            rounded = [math.ceil(side * scale / square) * square for side in (width, height)]
        return rounded[0], rounded[1]

    def prepare(self, image: Image.Image, size: tuple[int, int]) -> ImagePixels:
        """image: RGB. size: as size_of() says."""
        pixels = np.asarray(image.resize(size, resample=self.resample), dtype=np.uint8)
        grid_width, grid_height = (side // self.patch_size for side in size)
        values = self._patches(pixels, grid_height, grid_width).tobytes()
        levels = self.levels.tobytes()
        digest = blake2b(digest_size=DIGEST_BYTES)
        for part in (f"{grid_height} {grid_width} {self.num_frames}".encode(), levels, values):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return ImagePixels(
            digest.digest(), grid_height, grid_width, self.num_frames, levels, values
        )

    def _patches(
        self, pixels: npt.NDArray[np.uint8], grid_height: int, grid_width: int
    ) -> npt.NDArray[np.uint8]:
        """pixels: (height, width, 3) -> (patches, 3, patch_size, patch_size): squares of merged
        patches in rows, and the patches of a square in rows."""
        merge, side = self.merge_size, self.patch_size
        split = pixels.reshape(
            grid_height // merge, merge, side, grid_width // merge, merge, side, _CHANNELS
        )
        ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(ordered)


def _levels(factor: float, mean: Any, std: Any) -> npt.NDArray[np.float32]:
    """In the order and the precision of transformers' rescale() and normalize()."""
    rescaled = (np.arange(NUM_LEVELS, dtype=np.float64) * factor).astype(np.float32)
    shape = (_CHANNELS, 1)
    means, stds = (
        np.broadcast_to(np.asarray(values, dtype=np.float32).reshape(-1, 1), shape)
        for values in (mean, std)
    )
    if not (np.isfinite(means).all() and (stds > 0).all()):
        raise ValueError("image_mean and image_std must be numbers, the latter above 0")
    levels: npt.NDArray[np.float32] = ((rescaled - means) / stds).astype("<f4")
    return levels
