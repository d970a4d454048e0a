"""What every worker process does: frames of jobs on its standard input, frames of replies on its
standard output, until the input ends. Knows no kind of job.
"""

import os
import signal
from collections.abc import Callable
from typing import BinaryIO, TypeVar

import msgspec

from service.tokenizer.jobs import FRAME_HEADER, Reply, frame

J = TypeVar("J")


def open_replies() -> BinaryIO:
    """The real standard output; whatever a library prints goes to standard error from now on.

    Ctrl-C, which reaches every process of a terminal, ends the process no more: requests under way
    still need it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def serve(
    decoder: msgspec.msgpack.Decoder[J],
    run: Callable[[J], Reply],
    jobs: BinaryIO,
    replies: BinaryIO,
) -> None:
    """Answer every job in order until the input ends."""
    while (payload := _read_frame(jobs)) is not None:
        send(replies, run(decoder.decode(payload)))


def send(stream: BinaryIO, reply: Reply) -> None:
    stream.write(frame(msgspec.msgpack.encode(reply)))
    stream.flush()


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None
