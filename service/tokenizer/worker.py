"""A tokenizer process: frames of jobs on standard input, frames of replies on standard output.

Exits when its input ends, so it cannot outlive the ingress that started it. Started as
`python -m service.tokenizer.worker`; knows no event loop.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from service.tokenizer.encoder import EncodeRefusedError, PromptTooLongError, TextEncoder
from service.tokenizer.jobs import (
    FRAME_HEADER,
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodeText,
    Job,
    LoadFailed,
    Ready,
    Refused,
    Reply,
    TooLong,
    frame,
    pack_token_ids,
    unpack_token_ids,
)
from workers.errors import ModelLoadError

MAX_ADDRESS_SPACE_BYTES = 8 << 30


def serve(encoder: TextEncoder, jobs: BinaryIO, replies: BinaryIO) -> None:
    """Answer every job in order until the input ends."""
    decoder = msgspec.msgpack.Decoder(Job)
    while (payload := _read_frame(jobs)) is not None:
        _send(replies, run_job(encoder, decoder.decode(payload)))


def run_job(encoder: TextEncoder, job: Job) -> Reply:
    """What one job comes to; bad input is a Refused, not an exception."""
    try:
        match job:
            case EncodeText():
                return Encoded(pack_token_ids(encoder.encode_text(job)))
            case EncodeChat():
                return Encoded(pack_token_ids(encoder.encode_chat(job)))
            case DecodeTokens():
                token_ids = unpack_token_ids(job.token_ids).tolist()
                text = encoder.decode(token_ids, skip_special_tokens=job.skip_special_tokens)
                return Decoded(text)
    except EncodeRefusedError as error:
        return Refused(error.message, error.param)
    except PromptTooLongError as error:
        return TooLong(error.min_tokens)
    except MemoryError:
        return Refused("this needs more memory than a prompt may take")


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None


def _send(stream: BinaryIO, reply: Reply) -> None:
    stream.write(frame(msgspec.msgpack.encode(reply)))
    stream.flush()


def main(arguments: list[str]) -> None:
    """arguments: the model folder and the ceiling of a rendered conversation in bytes."""
    folder, max_rendered_bytes = Path(arguments[0]), int(arguments[1])
    # Ctrl-C reaches every process of a terminal; requests under way still need this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, hard))
    # Replies own the real standard output: whatever a library prints goes to standard error.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        encoder = TextEncoder(folder, max_rendered_bytes)
    except ModelLoadError as error:
        _send(replies, LoadFailed(str(error)))
        return
    _send(replies, Ready())
    serve(encoder, sys.stdin.buffer, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
