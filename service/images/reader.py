"""Image files of one prompt to what stands in the places of its placeholders."""

import binascii
import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.images.decoding import decode
from service.images.errors import ImageRefusedError
from service.images.files import ImageCeilings, ImageFile
from service.images.headers import ImageHeader, read_header
from service.images.preparation import Preparation
from workers.engine.content import ContentSpan
from workers.engine.pixels import ImagePixels
from workers.errors import ModelLoadError

_FILE = "preprocessor_config.json"
_COMBINED_FILE = "processor_config.json"
_COMBINED_KEY = "image_processor"
_FAMILIES = {"qwen2_vl", "qwen2_5_vl"}
"""Models whose eyes the engine has (workers.models.transformers_vision)."""


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """Token ids with as many placeholders as the images need; each image once."""

    token_ids: list[int]
    spans: list[ContentSpan]
    images: list[ImagePixels]


class TooManyTokensError(Exception):
    """No image was decoded: with them the prompt has num_tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class ImageReader:
    """One model folder's way of seeing. placeholder_id: of the token that its template writes."""

    def __init__(
        self, preparation: Preparation, placeholder_id: int, ceilings: ImageCeilings
    ) -> None:
        self.placeholder_id = placeholder_id
        self._preparation = preparation
        self._ceilings = ceilings

    def show(
        self, token_ids: Sequence[int], files: Sequence[ImageFile], max_tokens: int | None
    ) -> SeenPrompt:
        """token_ids: with one placeholder for each file, in order. Raises ImageRefusedError,
        TooManyTokensError, MemoryError."""
        places = [i for i, token_id in enumerate(token_ids) if token_id == self.placeholder_id]
        if len(places) != len(files):
            raise ImageRefusedError(
                f"the model's chat template shows {len(places)} of {len(files)} images there"
            )
        contents = [_bytes_of(file) for file in files]
        sizes = self._sizes([read_header(content) for content in contents], files)
        lengths = [self._num_tokens(size) for size in sizes]
        num_tokens = len(token_ids) - len(files) + sum(lengths)
        if max_tokens is not None and num_tokens > max_tokens:
            raise TooManyTokensError(num_tokens)
        with _memory_of(self._ceilings.memory_bytes):
            images = [
                self._preparation.prepare(decode(content, self._ceilings.max_pixels), size)
                for content, size in zip(contents, sizes, strict=True)
            ]
        ids, spans = _expanded(token_ids, places, lengths, images)
        return SeenPrompt(ids, spans, list({image.digest: image for image in images}.values()))

    def _sizes(
        self, headers: Sequence[ImageHeader], files: Sequence[ImageFile]
    ) -> list[tuple[int, int]]:
        ceilings = self._ceilings
        _check_total(sum(one.num_pixels for one in headers), ceilings.max_total_pixels, "")
        sizes = []
        for header, file in zip(headers, files, strict=True):
            most = min(file.max_pixels or ceilings.max_shown_pixels, ceilings.max_shown_pixels)
            sizes.append(self._preparation.size_of(header.width, header.height, most))
        num_shown = sum(width * height for width, height in sizes)
        _check_total(num_shown, ceilings.max_total_shown_pixels, ", as the model sees them,")
        return sizes

    def _num_tokens(self, size: tuple[int, int]) -> int:
        width, height = size
        return width * height // self._preparation.square**2


def image_reader_of(folder: Path, ceilings: ImageCeilings) -> ImageReader | None:
    """None for a folder whose model sees nothing, or which does not say how images are prepared."""
    config = _read_object(folder / "config.json")
    if config.get("model_type") not in _FAMILIES:
        return None
    found = _read_object(folder / _FILE) or _read_object(folder / _COMBINED_FILE).get(_COMBINED_KEY)
    if not isinstance(found, dict):
        return None
    placeholder_id = config.get("image_token_id")
    if not isinstance(placeholder_id, int):
        raise ModelLoadError("config.json has no image_token_id")
    return ImageReader(Preparation.of(found), placeholder_id, ceilings)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path.name} must hold a JSON object")
    return found


def _bytes_of(file: ImageFile) -> bytes:
    if not file.base64:
        return file.data
    try:
        return binascii.a2b_base64(file.base64, strict_mode=True)
    except ValueError as error:
        raise ImageRefusedError("the image is not base64") from error


def _check_total(found: int, most: int, how: str) -> None:
    if found > most:
        raise ImageRefusedError(f"all images together{how} have {found} pixels, {most} are allowed")


def _expanded(
    token_ids: Sequence[int],
    places: Sequence[int],
    lengths: Sequence[int],
    images: Sequence[ImagePixels],
) -> tuple[list[int], list[ContentSpan]]:
    ids: list[int] = []
    spans: list[ContentSpan] = []
    start = 0
    for place, length, image in zip(places, lengths, images, strict=True):
        ids.extend(token_ids[start:place])
        spans.append(ContentSpan(len(ids), length, image.digest))
        ids.extend([token_ids[place]] * length)
        start = place + 1
    ids.extend(token_ids[start:])
    return ids, spans


@contextmanager
def _memory_of(num_bytes: int) -> Iterator[None]:
    """Whoever wants more address space than that, native decoders too, is refused it."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + num_bytes
    soft = ceiling if before == resource.RLIM_INFINITY else min(ceiling, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
