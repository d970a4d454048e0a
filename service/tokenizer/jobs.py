"""What travels between the ingress and a tokenizer process: closed msgspec types, never pickle.

A frame is a little-endian uint32 length and that many bytes of msgpack.
"""

import array
import struct
from typing import Any

import msgspec

FRAME_HEADER = struct.Struct("<I")


class EncodeText(msgspec.Struct, frozen=True, tag="text"):
    """add_special_tokens: what the tokenizer's post-processor adds, such as a beginning token.

    parse_special_tokens: read special tokens written in the text as tokens, else as plain text.
    """

    text: str
    add_special_tokens: bool = True
    parse_special_tokens: bool = True


class EncodeChat(msgspec.Struct, frozen=True, tag="chat"):
    """messages: role, content and further fields, as the chat template reads them.

    continue_final_message: end the prompt inside the last message instead of after it.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] = {}


class DecodeTokens(msgspec.Struct, frozen=True, tag="decode"):
    """token_ids: little-endian uint32."""

    token_ids: bytes
    skip_special_tokens: bool = True


Job = EncodeText | EncodeChat | DecodeTokens


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """token_ids: little-endian uint32."""

    token_ids: bytes


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job's input was at fault; the message may go to a client."""

    message: str
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker's first frame: its tokenizer is loaded."""


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """A worker's only frame: the model folder cannot be served. For the operator."""

    message: str


Reply = Encoded | Decoded | Refused | Ready | LoadFailed


def pack_token_ids(token_ids: list[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    values = array.array("I")
    values.frombytes(data)
    return values.tolist()


def frame(payload: bytes) -> bytes:
    return FRAME_HEADER.pack(len(payload)) + payload
