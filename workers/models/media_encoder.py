"""What the runner asks of a model that takes images beside text."""

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.engine.media import MediaInfo, MediaItem
from workers.models.mrope import RotaryPositions
from workers.scheduler.media_plan import PlacedMedia


class MediaEncoder(Protocol):
    """Makes embeddings of one content at a time, which stand in place of its placeholders'."""

    def info(self, store_bytes: int) -> MediaInfo:
        """What the model takes, where embeddings of so many bytes are held at a time."""

    def encode(self, item: MediaItem) -> torch.Tensor:
        """item: one that info takes -> (its placeholders, hidden_size), on the model's device."""

    def positions(self, spans: Sequence[PlacedMedia]) -> RotaryPositions:
        """Of the tokens of a prompt with these contents."""
