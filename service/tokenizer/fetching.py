"""A tokenizer that fetches images which a chat names by their URLs, then hands the chat on."""

from collections.abc import Sequence

import msgspec

from service.images.files import ImageFile
from service.limits import Limits
from service.remote.fetcher import Fetcher
from service.tokenizer.constraints import Constraint
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import (
    AudioFeatures,
    EncodeChat,
    EncodedTexts,
    EncodeText,
    EncodeTexts,
    ReadAudio,
    Seen,
)
from service.tokenizer.pool import Tokenizer


class FetchingTokenizer:
    """Implements Tokenizer. What is fetched for a chat has the ceilings of what is sent."""

    def __init__(self, inner: Tokenizer, fetcher: Fetcher, limits: Limits) -> None:
        self._inner = inner
        self._fetcher = fetcher
        self._limits = limits

    async def encode_images(self, job: EncodeChat, flow: Flow) -> Seen:
        urls = [image.url for image in job.images if image.url]
        if urls:
            files = iter(await self._fetch(urls))
            images = [_with_data(one, next(files)) if one.url else one for one in job.images]
            job = msgspec.structs.replace(job, images=images)
        return await self._inner.encode_images(job, flow)

    async def encode_text(self, job: EncodeText, flow: Flow) -> Sequence[int]:
        return await self._inner.encode_text(job, flow)

    async def encode_texts(self, job: EncodeTexts, flow: Flow) -> EncodedTexts:
        return await self._inner.encode_texts(job, flow)

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> Sequence[int]:
        return await self._inner.encode_chat(job, flow)

    async def decode(
        self, token_ids: Sequence[int], flow: Flow, *, skip_special_tokens: bool
    ) -> str:
        return await self._inner.decode(token_ids, flow, skip_special_tokens=skip_special_tokens)

    async def make_grammar(self, constraint: Constraint, param: str, flow: Flow) -> str:
        return await self._inner.make_grammar(constraint, param, flow)

    async def read_audio(self, job: ReadAudio, flow: Flow) -> AudioFeatures:
        return await self._inner.read_audio(job, flow)

    async def _fetch(self, urls: Sequence[str]) -> list[bytes]:
        limits = self._limits
        return await self._fetcher.fetch(urls, limits.max_image_bytes, limits.max_body_bytes)


def _with_data(image: ImageFile, data: bytes) -> ImageFile:
    return ImageFile(data=data, max_pixels=image.max_pixels)
