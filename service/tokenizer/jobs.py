"""What travels between the ingress and a tokenizer process: closed msgspec types, never pickle.

A frame is a little-endian uint32 length and that many bytes of msgpack.
"""

import array
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from service.images.files import ImageFile
from service.tokenizer.constraints import Constraint, constraint_bytes
from workers.engine.content import ContentSpan
from workers.engine.encoder_input import SourceFeatures
from workers.engine.pixels import ImagePixels

FRAME_HEADER = struct.Struct("<I")
_MESSAGE_BYTES = 256
"""What rendering a message costs besides its text."""
_IMAGE_BYTES = 256 << 10
"""What an image costs besides its file: it is never a short job."""


class EncodeText(msgspec.Struct, frozen=True, tag="text"):
    """add_special_tokens: what the tokenizer's post-processor adds, such as a beginning token.

    parse_special_tokens: read special tokens written in the text as tokens, else as plain text.
    suffix: what stands behind a hole that is to be filled, for models that have marks for that.
    max_tokens: the answer may be TooLong where there are certainly more; None: there may be any.
    """

    text: str
    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    max_tokens: int | None = None
    suffix: str = ""


class EncodeChat(msgspec.Struct, frozen=True, tag="chat"):
    """messages: role, content and further fields, as the chat template reads them.

    tools: as OpenAI's API has them. continue_final_message: end the prompt inside the last message
    instead of after it. images: one for each part of a message's content that is one, in order.
    max_tokens: as in EncodeText.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] = {}
    max_tokens: int | None = None
    images: list[ImageFile] = []


class EncodeTexts(msgspec.Struct, frozen=True, tag="texts"):
    """A text, or a pair of texts, as models read them that are an encoder alone.

    add_special_tokens, parse_special_tokens, max_tokens: as in EncodeText. kept_tokens: the most
    there may be, special ones included, which are never cut off; None: nothing is. keeps_beginning:
    of the texts, of a pair's longer one first; else their end.
    """

    texts: list[str]
    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    max_tokens: int | None = None
    kept_tokens: int | None = None
    keeps_beginning: bool = True


class DecodeTokens(msgspec.Struct, frozen=True, tag="decode"):
    """token_ids: little-endian uint32."""

    token_ids: bytes
    skip_special_tokens: bool = True


class CompileGrammar(msgspec.Struct, frozen=True, tag="grammar"):
    constraint: Constraint


class ReadAudio(msgspec.Struct, frozen=True, tag="audio"):
    """data: an audio file."""

    data: bytes


ModelJob = EncodeText | EncodeTexts | EncodeChat | DecodeTokens | ReadAudio
"""What a process with a model's tokenizer does."""
Job = ModelJob | CompileGrammar


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """token_ids: little-endian uint32."""

    token_ids: bytes


class EncodedTexts(msgspec.Struct, frozen=True, tag="encoded_texts"):
    """token_ids: as in Encoded. second_start: where the tokens of a pair's second text begin, as
    the tokenizer's own types of tokens say; 0 where they are all of one type."""

    token_ids: bytes
    second_start: int


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """A conversation with images. token_ids: as in Encoded, with the images' placeholders."""

    token_ids: bytes
    spans: list[ContentSpan]
    images: list[ImagePixels]


class TooLong(msgspec.Struct, frozen=True, tag="too_long"):
    """The text was not encoded: it has at least min_tokens tokens, more than were allowed."""

    min_tokens: int


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    text: str


class AudioFeatures(msgspec.Struct, frozen=True, tag="features"):
    """features: as an encoder reads them. duration_s: of the audio."""

    features: SourceFeatures
    duration_s: float


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """grammar: in llguidance's serialised form."""

    grammar: str


class TooCostly(msgspec.Struct, frozen=True, tag="too_costly"):
    """The job took more than a job may; the message may go to a client."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job's input was at fault; the message may go to a client."""

    message: str
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker's first frame: its tokenizer is loaded."""


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """A worker's only frame: the model folder cannot be served. For the operator."""

    message: str


Reply = (
    Encoded
    | EncodedTexts
    | Seen
    | TooLong
    | Decoded
    | AudioFeatures
    | Compiled
    | TooCostly
    | Refused
    | Ready
    | LoadFailed
)


def job_bytes(job: Job) -> int:
    """How much there is to go through, in bytes or what costs as much."""
    match job:
        case EncodeText():
            return utf8_bytes(job.text)
        case EncodeTexts():
            return sum(map(utf8_bytes, job.texts))
        case EncodeChat():
            strings = strings_in([job.messages, job.tools])
            images = sum(_IMAGE_BYTES + image.num_bytes for image in job.images)
            return _MESSAGE_BYTES * len(job.messages) + sum(map(utf8_bytes, strings)) + images
        case DecodeTokens():
            return len(job.token_ids)
        case CompileGrammar():
            return constraint_bytes(job.constraint)
        case ReadAudio():
            return len(job.data)


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, names of fields included, in no order. However deep it is, each
    takes the same time."""
    unseen = [value]
    while unseen:
        item = unseen.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from map(str, item)
            unseen.extend(item.values())
        elif isinstance(item, list):
            unseen.extend(item)


def utf8_bytes(text: str) -> int:
    """Of any text, halves of pairs among them."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> "array.array[int]":
    """Four bytes a token, whatever it is asked for: a list of millions takes long to be freed."""
    values = array.array("I")
    values.frombytes(data)
    return values


def frame(payload: bytes) -> bytes:
    return FRAME_HEADER.pack(len(payload)) + payload
