"""POST /v1/audio/transcriptions: the form, what it means to the handler, and its answers."""

import math
from typing import Any, Literal, cast, get_args

from msgspec import Struct
from starlette.responses import Response

from service.api.http_replies import json_response
from service.api.multipart import Form
from service.errors import ApiError, ApiErrorCode
from service.handler.transcription import Transcript, TranscriptionRequest

Format = Literal["json", "text", "verbose_json"]
_FIELDS = frozenset(("model", "language", "prompt", "response_format", "temperature"))
# Values that ask for nothing; others are refused with the parameter's name.
_HARMLESS: dict[str, tuple[str, ...]] = {
    "stream": ("false", "False", ""),
    "chunking_strategy": ("",),
    "include[]": (),
    "timestamp_granularities[]": (),
    "known_speaker_names[]": (),
    "known_speaker_references[]": (),
}
_MAX_TEMPERATURE = 1.0

FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": list(get_args(Format))},
        "temperature": {"type": "number", "minimum": 0, "maximum": _MAX_TEMPERATURE},
    },
}


class DurationUsage(Struct, frozen=True):
    """seconds: of audio, begun ones counted whole."""

    seconds: int
    type: str = "duration"


class TranscriptionBody(Struct, frozen=True):
    text: str
    usage: DurationUsage


class VerboseTranscriptionBody(Struct, frozen=True):
    """language: its code. duration: seconds. There are no segments: no timestamps are made."""

    task: str
    language: str
    duration: float
    text: str
    usage: DurationUsage


class TranscriptionForm:
    """The parsed form. Raises ApiError for what is not honoured, by name."""

    def __init__(self, form: Form) -> None:
        fields = form.fields
        for name, value in fields.items():
            if name not in _FIELDS and value not in _HARMLESS.get(name, ()):
                code = ApiErrorCode.UNKNOWN_PARAMETER
                if name in _HARMLESS:
                    code = ApiErrorCode.UNSUPPORTED_PARAMETER
                shown = name[:128]
                raise ApiError(code, f"{shown} is not supported with this value", shown)
        self.model = fields.get("model", "")
        self.format = _format_of(fields.get("response_format", "json"))
        self._form = form

    def to_request(self, request_id: str) -> TranscriptionRequest:
        fields = self._form.fields
        return TranscriptionRequest(
            audio=self._form.file,
            language=fields.get("language", "").strip().lower(),
            prompt=fields.get("prompt", ""),
            temperature=_temperature_of(fields.get("temperature", "0")),
            request_id=request_id,
        )

    def response(self, transcript: Transcript) -> Response:
        usage = DurationUsage(math.ceil(transcript.duration_s))
        match self.format:
            case "text":
                return Response(transcript.text + "\n", media_type="text/plain; charset=utf-8")
            case "json":
                return json_response(TranscriptionBody(transcript.text, usage))
            case "verbose_json":
                return json_response(
                    VerboseTranscriptionBody(
                        "transcribe",
                        transcript.language,
                        transcript.duration_s,
                        transcript.text,
                        usage,
                    )
                )


def _format_of(value: str) -> Format:
    if value not in get_args(Format):
        raise ApiError(
            ApiErrorCode.UNSUPPORTED_PARAMETER,
            f"response_format must be one of {', '.join(get_args(Format))}",
            "response_format",
        )
    return cast("Format", value)


def _temperature_of(value: str) -> float:
    try:
        temperature = float(value)
    except ValueError:
        temperature = math.nan
    if not 0.0 <= temperature <= _MAX_TEMPERATURE:
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST,
            f"temperature must be a number in [0, {_MAX_TEMPERATURE:g}]",
            "temperature",
        )
    return temperature
