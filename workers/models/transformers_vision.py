"""The eyes of models of transformers: its own code, one image at a time.

A list of families, not a probe: wrong positions or features of another layer look right at a
glance (decision 0078).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from workers.engine.media import ImageInfo, MediaItem
from workers.models.media_encoder import MediaEncoder
from workers.models.mrope import RotaryPositions, mrope_positions
from workers.sampling.transfer import upload
from workers.scheduler.media_plan import PlacedMedia

_WITH_PATCH_GRIDS = {"Qwen2VLModel", "Qwen2_5_VLModel"}


def media_encoder_of(body: nn.Module) -> MediaEncoder | None:
    """body: of a causal language model, whole. None where images are not taken."""
    return PatchGridVision(body) if type(body).__name__ in _WITH_PATCH_GRIDS else None


class PatchGridVision:
    """Qwen2-VL and Qwen2.5-VL: patches in merged squares, positions of three rows."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._config = body.config
        self._merge_size: int = body.config.vision_config.spatial_merge_size

    def info(self, store_bytes: int) -> ImageInfo:
        vision = self._config.vision_config
        weight = self._body.get_input_embeddings().weight
        patch_volume = vision.temporal_patch_size * vision.patch_size**2
        return ImageInfo(
            placeholder_id=self._config.image_token_id,
            values_per_patch=vision.in_channels * patch_volume,
            merge_size=self._merge_size,
            max_tokens=store_bytes // (weight.shape[1] * weight.itemsize),
            takes_pixels=True,
        )

    def encode(self, item: MediaItem) -> torch.Tensor:
        weight = self._body.get_input_embeddings().weight
        grid_sizes = np.array([[1, item.grid_height, item.grid_width]], dtype=np.int64)
        patches, grid = upload([item.patches, grid_sizes], weight.device)
        outputs = self._body.get_image_features(patches, grid, return_dict=True)
        (features,) = outputs.pooler_output
        embeddings: torch.Tensor = features.to(weight.dtype)
        return embeddings

    def positions(self, spans: Sequence[PlacedMedia]) -> RotaryPositions:
        return mrope_positions(spans, self._merge_size)
