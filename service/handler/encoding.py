"""Prompts to token ids and back, constraints to grammars, as turns come. Knows no stream."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from service.errors import ApiError, ApiErrorCode
from service.handler.checks import FittedPrompt
from service.handler.requests import (
    AS_MANY_AS_FIT,
    AudioPrompt,
    EncoderPrompt,
    GenerationRequest,
    ImagePrompt,
    NamedConstraint,
    Prompt,
    TokenPrompt,
)
from service.handler.turns import in_turns
from service.request_context import RequestContext
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import (
    AudioFeatures,
    EncodeChat,
    EncodeText,
    EncodeTexts,
    ReadAudio,
    unpack_token_ids,
)
from service.tokenizer.pool import Tokenizer
from workers.engine.content import ContentSpan
from workers.engine.encoder_input import EncoderInput, SourceTokens, TextEncoder
from workers.engine.media import MediaItem
from workers.engine.protocol import ModelInfo

_TOKENISED = (TokenPrompt, AudioPrompt, ImagePrompt, EncoderPrompt)
_IDS_PER_TURN = 1 << 16
_FEW_IDS = 1 << 12
_FEW_PROMPTS = 256
# Of one request with the tokenizer, whose queue is everybody's.
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """max_tokens: output tokens that each of its choices may have. source: what an encoder reads of
    it, where the model has one; token_ids are then how the decoder begins. spans, images: what
    stands in place of its placeholders. second_start: as EncoderPrompt has it."""

    token_ids: list[int]
    max_tokens: int
    source: EncoderInput | None = None
    spans: list[ContentSpan] = field(default_factory=list)
    images: list[MediaItem] = field(default_factory=list)
    second_start: int = 0

    @property
    def client_token_ids(self) -> list[int]:
        """What the client calls its prompt."""
        return self.source.token_ids if isinstance(self.source, SourceTokens) else self.token_ids

    @property
    def num_input_tokens(self) -> int:
        """As GenerateRequest has it."""
        own = len(self.token_ids)
        return own if self.source is None else own + self.source.max_encoder_tokens


class PromptEncoder:
    """All methods may raise ApiError. However many tokens there are, others have their turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(
        self,
        prompts: Sequence[Prompt],
        context: RequestContext,
        info: ModelInfo,
        max_tokens: int | None,
    ) -> list[Sequence[int]]:
        """max_tokens: texts that certainly have more are refused unread; None: nothing is."""
        flow = _flow_of(context)
        if len(prompts) == 1:
            return [await self._encode(prompts[0], flow, info, max_tokens)]
        # Ids are looked at here, so that several at once would only hold the loop for longer.
        max_at_once = 1 if isinstance(prompts[0], _TOKENISED) else _TEXTS_AT_ONCE
        return await in_turns(
            prompts, lambda prompt: self._encode(prompt, flow, info, max_tokens), max_at_once
        )

    async def encode_plain(
        self,
        texts: Sequence[str],
        context: RequestContext,
        *,
        parse_special_tokens: bool = False,
    ) -> list[list[int]]:
        """Tokens of texts as they stand within others."""
        flow = _flow_of(context)

        async def encode(text: str) -> list[int]:
            job = EncodeText(
                text, add_special_tokens=False, parse_special_tokens=parse_special_tokens
            )
            return list(await self._tokenizer.encode_text(job, flow))

        return await in_turns(texts, encode, _TEXTS_AT_ONCE)

    async def see(
        self, request: GenerationRequest, context: RequestContext, max_tokens: int | None
    ) -> GenerationRequest:
        """The request, its chats with images tokenised. max_tokens: as in encode()."""
        if not any(isinstance(one, EncodeChat) and one.images for one in request.prompts):
            return request
        seen = [await self.see_prompt(prompt, context, max_tokens) for prompt in request.prompts]
        return replace(request, prompts=tuple(seen))

    async def see_prompt(
        self, prompt: Prompt, context: RequestContext, max_tokens: int | None
    ) -> Prompt:
        if not (isinstance(prompt, EncodeChat) and prompt.images):
            return prompt
        job = msgspec.structs.replace(prompt, max_tokens=max_tokens)
        seen = await self._tokenizer.encode_images(job, _flow_of(context))
        images: list[MediaItem] = [*seen.images]
        return ImagePrompt(unpack_token_ids(seen.token_ids), seen.spans, images)

    async def read(
        self, request: GenerationRequest, context: RequestContext, info: ModelInfo
    ) -> GenerationRequest:
        """The request, its texts tokenised as an encoder reads them, where the model is one alone:
        cut where that is asked for, without the loss of what the tokenizer puts around them."""
        if not info.is_encoder_only:
            return request
        flow = _flow_of(context)
        kept = request.truncate_prompt_tokens
        kept = info.max_request_len if kept == AS_MANY_AS_FIT else kept

        async def read(prompt: Prompt) -> Prompt:
            job = _as_texts(prompt)
            if job is None:
                return prompt
            job = msgspec.structs.replace(
                job,
                kept_tokens=kept,
                keeps_beginning=request.keeps_beginning is not False,
                max_tokens=info.max_request_len if kept is None else None,
            )
            encoded = await self._tokenizer.encode_texts(job, flow)
            return EncoderPrompt(unpack_token_ids(encoded.token_ids), encoded.second_start)

        return replace(
            request, prompts=tuple(await in_turns(request.prompts, read, _TEXTS_AT_ONCE))
        )

    async def make_grammar(self, named: NamedConstraint | None, context: RequestContext) -> str:
        """What engines take; "" for no constraint."""
        if named is None:
            return ""
        flow = _flow_of(context)
        return await self._tokenizer.make_grammar(named.constraint, named.param, flow)

    async def decode(
        self,
        sequences: Sequence[Sequence[int]],
        context: RequestContext,
        *,
        skip_special_tokens: bool,
    ) -> list[str]:
        flow = _flow_of(context)
        return await asyncio.gather(
            *(
                self._tokenizer.decode(token_ids, flow, skip_special_tokens=skip_special_tokens)
                for token_ids in sequences
            )
        )

    async def read_audio(self, audio: bytes, context: RequestContext) -> AudioFeatures:
        return await self._tokenizer.read_audio(ReadAudio(audio), _flow_of(context))

    async def _encode(
        self, prompt: Prompt, flow: Flow, info: ModelInfo, max_tokens: int | None
    ) -> Sequence[int]:
        if isinstance(prompt, _TOKENISED):
            await check_range(prompt.token_ids, info, "prompt")
            return await _as_list(prompt.token_ids)
        if isinstance(prompt, EncodeTexts):
            message = "this model reads no pairs of texts"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "prompt")
        job = msgspec.structs.replace(prompt, max_tokens=max_tokens)
        if isinstance(job, EncodeChat):
            return await self._tokenizer.encode_chat(job, flow)
        return await self._tokenizer.encode_text(job, flow)


def _as_texts(prompt: Prompt) -> EncodeTexts | None:
    match prompt:
        case EncodeTexts():
            return prompt
        case EncodeText():
            return EncodeTexts(
                [prompt.text], prompt.add_special_tokens, prompt.parse_special_tokens
            )
        case _:
            return None


async def check_range(token_ids: Sequence[int], info: ModelInfo, param: str) -> None:
    """Raise ApiError unless the model has all of these tokens."""
    for start in range(0, len(token_ids), _IDS_PER_TURN):
        some = token_ids[start : start + _IDS_PER_TURN]
        if min(some) < 0 or max(some) >= info.vocab_size:
            message = f"token ids must be in [0, {info.vocab_size})"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
        if len(some) > _FEW_IDS:
            await asyncio.sleep(0)


async def for_engine(fitted: Sequence[FittedPrompt]) -> list[EnginePrompt]:
    """Prompts that fit, as engines take them. Thousands are made in a turn of their own."""
    if len(fitted) > _FEW_PROMPTS:
        await asyncio.sleep(0)
    made = [EnginePrompt(await _as_list(each.token_ids), each.max_tokens) for each in fitted]
    if len(fitted) > _FEW_PROMPTS:
        await asyncio.sleep(0)
    return made


def with_sources(
    prompts: Sequence[EnginePrompt], asked: Sequence[Prompt], info: ModelInfo
) -> list[EnginePrompt]:
    """asked: the prompts as the client sent them. Of a model that reads text the client's tokens
    are its encoder's, and its decoder begins by itself."""
    if isinstance(info.encoder, TextEncoder):
        start = list(info.encoder.start.token_ids)
        return [EnginePrompt(start, p.max_tokens, SourceTokens(p.token_ids)) for p in prompts]
    return [_with_source(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]


def _with_source(prompt: EnginePrompt, asked: Prompt) -> EnginePrompt:
    match asked:
        case AudioPrompt():
            return replace(prompt, source=asked.features)
        case ImagePrompt():
            return replace(prompt, spans=asked.spans, images=asked.images)
        case EncoderPrompt():
            return replace(prompt, second_start=asked.second_start)
        case _:
            return prompt


async def _as_list(token_ids: Sequence[int]) -> list[int]:
    if isinstance(token_ids, list):
        return token_ids
    listed: list[int] = []
    for start in range(0, len(token_ids), _IDS_PER_TURN):
        listed.extend(token_ids[start : start + _IDS_PER_TURN])
        if start + _IDS_PER_TURN < len(token_ids):
            await asyncio.sleep(0)
    return listed


def _flow_of(context: RequestContext) -> Flow:
    """A request has one record for as long as it lives."""
    return Flow(context.caller.name, f"{id(context.record):x}")
