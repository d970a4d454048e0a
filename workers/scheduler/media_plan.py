"""What a plan says of images: which of them the ranks take in or forget, and where they stand."""

import msgspec

from workers.engine.media import MediaItem


class PlacedMedia(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start .. start + num_tokens - 1 of a slot's prompt stand for this content."""

    start: int
    num_tokens: int
    digest: bytes
    grid_height: int
    grid_width: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


class MediaGrant(msgspec.Struct, frozen=True, array_like=True):
    """A slot's request has these, in order, from this step on."""

    slot: int
    spans: tuple[PlacedMedia, ...]


class AddedMedia(msgspec.Struct, frozen=True, array_like=True):
    """num_tokens: embeddings that the model makes of item."""

    num_tokens: int
    item: MediaItem


class MediaPlan(msgspec.Struct, frozen=True):
    """dropped: digests of contents that no rank keeps embeddings of any longer. ended: slots whose
    request with images has left. Both take effect first; then grants and, before the step's rows,
    added, whose embeddings are made and kept. Carrying a plan out again changes nothing."""

    dropped: tuple[bytes, ...] = ()
    ended: tuple[int, ...] = ()
    grants: tuple[MediaGrant, ...] = ()
    added: tuple[AddedMedia, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each content that is added."""
        return [one.num_tokens for one in self.added]


NO_MEDIA = MediaPlan()
