"""Images that a request brings for its placeholders, and what a model takes of them.

msgspec structs with closed types, as in protocol.py. Knows no model and no image file: an image has
been cut into patches, as its model's processor does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from workers.engine.content import DIGEST_BYTES, ContentSpan
from workers.engine.pixels import ImagePixels
from workers.errors import ErrorCode, RequestRejectedError

MAX_IMAGE_BYTES = 128 << 20
"""Of one image's patches: a step's plan, whose frame holds twice that, takes them along."""

_VALUE = np.dtype("<f4")


class ImagePatches(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image", tag_field="kind"
):
    """The content of every span with this digest. Brought once, however many spans show it.

    grid_height, grid_width: in patches. values: float32, little-endian, (grid_height * grid_width,
    values of a patch), in the order in which the model's processor lays patches out.
    """

    digest: bytes
    grid_height: int
    grid_width: int
    values: bytes

    @classmethod
    def of(
        cls, digest: bytes, grid_height: int, grid_width: int, patches: npt.NDArray[Any]
    ) -> "ImagePatches":
        """patches: (grid_height * grid_width, values of a patch)."""
        values = np.ascontiguousarray(patches, dtype=_VALUE).tobytes()
        return cls(digest, grid_height, grid_width, values)

    @property
    def num_patches(self) -> int:
        return self.grid_height * self.grid_width

    @property
    def patches(self) -> npt.NDArray[np.float32]:
        """float32 (num_patches, values of a patch), read-only."""
        flat = np.frombuffer(self.values, dtype=_VALUE).astype(np.float32, copy=False)
        return flat.reshape(self.num_patches, -1)

    def num_bytes_for(self, values_per_patch: int) -> int:
        """What values has to have where a model's patches have that many."""
        return self.num_patches * values_per_patch * _VALUE.itemsize

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.patches).all())


MediaItem = ImagePatches | ImagePixels


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens start .. stop - 1 of a prompt, in whose places stand what the model makes of item."""

    start: int
    stop: int
    item: MediaItem

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class ImageInfo(msgspec.Struct, frozen=True, tag="image", tag_field="kind"):
    """What a model with eyes takes.

    placeholder_id: of the token that stands for a part of an image. values_per_patch: of each
    patch. merge_size: so many patches in either direction become one placeholder's embedding.
    max_tokens: placeholders that the engine holds embeddings for at a time. takes_pixels: whether
    it is of a version that knows ImagePixels.
    """

    placeholder_id: int
    values_per_patch: int
    merge_size: int
    max_tokens: int
    takes_pixels: bool = False

    def spans_of(
        self,
        spans: Sequence[ContentSpan],
        items: Sequence[MediaItem],
        prompt_ids: npt.NDArray[np.int32],
    ) -> tuple[MediaSpan, ...]:
        """spans with what stands behind them. spans: in order and within the prompt.

        Raises RequestRejectedError unless every span has an item, every item a span, and all of
        them the right size.
        """
        by_digest = {item.digest: item for item in items}
        if len(by_digest) < len(items):
            raise _rejected("an image is brought once, however many spans show it")
        if shown := by_digest.keys() - {span.digest for span in spans}:
            raise _rejected(f"{len(shown)} images are brought that no span shows")
        for item in items:
            self._check(item)
        found = tuple(self._with_item(span, by_digest) for span in spans)
        if found:
            self._check_placeholders(found, prompt_ids)
        return found

    def num_tokens_of(self, item: MediaItem) -> int:
        """Placeholders that stand for it."""
        return item.num_patches // self.merge_size**2

    def _check(self, item: MediaItem) -> None:
        if len(item.digest) != DIGEST_BYTES:
            raise _rejected(f"a digest has {DIGEST_BYTES} bytes, not {len(item.digest)}")
        height, width, merge = item.grid_height, item.grid_width, self.merge_size
        if height < 1 or width < 1 or height % merge or width % merge:
            raise _rejected(f"{height} x {width} patches do not make squares of {merge} x {merge}")
        num_tokens = self.num_tokens_of(item)
        if num_tokens > self.max_tokens:
            raise _rejected(
                f"an image of {height} x {width} patches takes {num_tokens} tokens, this engine "
                f"holds {self.max_tokens} (media_store_bytes)"
            )
        expected = item.num_bytes_for(self.values_per_patch)
        if len(item.values) != expected:
            raise _rejected(
                f"{height} x {width} patches of {self.values_per_patch} values in "
                f"{_form_of(item)} have {expected} bytes, not {len(item.values)}"
            )
        if expected > MAX_IMAGE_BYTES:
            raise _rejected(f"an image has at most {MAX_IMAGE_BYTES} bytes, not {expected}")
        if not item.is_finite:
            raise _rejected("patches must be finite numbers")

    def _with_item(self, span: ContentSpan, by_digest: dict[bytes, MediaItem]) -> MediaSpan:
        item = by_digest.get(span.digest)
        if item is None:
            raise _rejected(f"no image is brought for the placeholders from token {span.start} on")
        if span.num_tokens != self.num_tokens_of(item):
            raise _rejected(
                f"an image of {item.grid_height} x {item.grid_width} patches takes "
                f"{self.num_tokens_of(item)} placeholders, there are {span.num_tokens} from token "
                f"{span.start} on"
            )
        return MediaSpan(span.start, span.stop, item)

    def _check_placeholders(
        self, spans: Sequence[MediaSpan], prompt_ids: npt.NDArray[np.int32]
    ) -> None:
        is_spanned = np.zeros(len(prompt_ids), dtype=np.bool_)
        for span in spans:
            is_spanned[span.start : span.stop] = True
        wrong = np.flatnonzero(is_spanned != (prompt_ids == self.placeholder_id))
        if len(wrong):
            place = int(wrong[0])
            what = "no placeholder" if is_spanned[place] else "a placeholder without an image"
            raise _rejected(f"token {place} is {what} (placeholders are {self.placeholder_id})")


MediaInfo = ImageInfo


def _form_of(item: MediaItem) -> str:
    return "bytes" if isinstance(item, ImagePixels) else "float32"


def _rejected(message: str) -> RequestRejectedError:
    return RequestRejectedError(ErrorCode.INVALID_REQUEST, message, "media")
