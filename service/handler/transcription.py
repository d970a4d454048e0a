"""A transcription: hear the audio, find its language, write it down. Knows no HTTP.

Two generations at most: the first asks for the language in one token, as Whisper's own generate()
does, and what its encoder made of the audio is there for the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import ApiError, ApiErrorCode
from service.handler.collect import ChoiceResult, collect
from service.handler.handler import Handler
from service.handler.requests import AudioPrompt, GenerationRequest
from service.request_context import RequestContext
from service.security.quota import FreeLease, Lease
from service.tokenizer.jobs import EncodeText
from workers.engine.encoder_input import FeatureEncoder, SourceFeatures
from workers.sampling.params import SamplingParams

_ONLY_LANGUAGE = "en"
_CHOOSE_AMONG = 100.0
"""The highest bias that there is: no other token is as likely as one that has it."""


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """audio: a WAV file. language: a code of ISO 639-1; "" finds it out. prompt: text that came
    before, or that is written alike."""

    audio: bytes
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    language: str
    duration_s: float


async def transcribe(
    handler: Handler, request: TranscriptionRequest, context: RequestContext, lease: Lease
) -> Transcript:
    """Raises ApiError. The lease is ended."""
    encoder = handler.model_info.encoder
    if not isinstance(encoder, FeatureEncoder):
        raise ApiError(ApiErrorCode.INVALID_REQUEST, "this model reads no audio", "model")
    _check_language(request.language, encoder)
    before = await _tokens_before(handler, encoder, request.prompt, context)
    heard = await handler.read_audio(request.audio, context)
    writer = _Writer(handler, encoder, heard.features, request, context)
    language = request.language or await writer.find_language()
    text = await writer.write(before, language, lease)
    return Transcript(text, language, heard.duration_s)


class _Writer:
    """What its decoder is asked of one audio."""

    def __init__(
        self,
        handler: Handler,
        encoder: FeatureEncoder,
        features: SourceFeatures,
        request: TranscriptionRequest,
        context: RequestContext,
    ) -> None:
        self._handler = handler
        self._encoder = encoder
        self._features = features
        self._request = request
        self._context = context

    async def find_language(self) -> str:
        languages = self._encoder.speech.languages
        if not languages:
            return _ONLY_LANGUAGE
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logit_bias=dict.fromkeys(languages.values(), _CHOOSE_AMONG),
        )
        first = self._encoder.start.token_ids[:1]
        result = await self._generate(first, sampling, FreeLease())
        by_token = {token_id: code for code, token_id in languages.items()}
        code = by_token.get(result.token_ids[0])
        if code is None:
            raise ApiError(ApiErrorCode.INTERNAL, "the model named no language")
        return code

    async def write(self, before: Sequence[int], language: str, lease: Lease) -> str:
        speech = self._encoder.speech
        told = (speech.languages.get(language), speech.transcribe, speech.no_timestamps)
        start = [*before, *self._encoder.start.token_ids, *(one for one in told if one is not None)]
        sampling = SamplingParams(temperature=self._request.temperature)
        result = await self._generate(start, sampling, lease)
        return result.text.strip()

    async def _generate(
        self, start: Sequence[int], sampling: SamplingParams, lease: Lease
    ) -> ChoiceResult:
        request = GenerationRequest(
            (AudioPrompt(self._features, list(start)),),
            sampling,
            request_id=self._request.request_id,
        )
        async with await self._handler.start(request, self._context, lease) as generation:
            (result,) = await collect(generation)
        return result


def _check_language(code: str, encoder: FeatureEncoder) -> None:
    known = encoder.speech.languages or {_ONLY_LANGUAGE: 0}
    if code and code not in known:
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST,
            f"language must be one of {', '.join(sorted(known))}",
            "language",
        )


async def _tokens_before(
    handler: Handler, encoder: FeatureEncoder, prompt: str, context: RequestContext
) -> list[int]:
    """At most half of the context, of the prompt's end, as Whisper was trained."""
    text = prompt.strip()
    if not text:
        return []
    previous = encoder.speech.previous
    if previous is None:
        raise ApiError(
            ApiErrorCode.UNSUPPORTED_PARAMETER, "this model takes no text before audio", "prompt"
        )
    job = EncodeText(" " + text, add_special_tokens=False, parse_special_tokens=False)
    token_ids = await handler.tokenise(job, context)
    most = handler.model_info.max_context_len // 2 - 1
    return [previous, *token_ids[-most:]]
