"""A tokenizer process: frames of jobs on standard input, frames of replies on standard output.

Exits when its input ends, so it cannot outlive the ingress that started it. Started as
`python -m service.tokenizer.worker`; knows no event loop.
"""

import resource
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from service.audio.features import FeatureReader, feature_reader_of
from service.audio.wav import AudioRefusedError
from service.images.errors import ImageRefusedError
from service.images.files import ImageCeilings
from service.images.reader import ImageReader, TooManyTokensError, image_reader_of
from service.tokenizer import worker_loop
from service.tokenizer.encoder import EncodeRefusedError, PromptTooLongError, TextEncoder
from service.tokenizer.jobs import (
    AudioFeatures,
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodedTexts,
    EncodeText,
    EncodeTexts,
    LoadFailed,
    ModelJob,
    ReadAudio,
    Ready,
    Refused,
    Reply,
    Seen,
    TooLong,
    pack_token_ids,
    unpack_token_ids,
)
from workers.engine.encoder_input import SourceFeatures
from workers.errors import ModelLoadError

MAX_ADDRESS_SPACE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Tools:
    """audio, images: None where the model takes none."""

    text: TextEncoder
    audio: FeatureReader | None
    images: ImageReader | None = None


def serve(tools: Tools, jobs: BinaryIO, replies: BinaryIO) -> None:
    """Answer every job in order until the input ends."""
    worker_loop.serve(msgspec.msgpack.Decoder(ModelJob), partial(run_job, tools), jobs, replies)


def run_job(tools: Tools, job: ModelJob) -> Reply:
    """What one job comes to; bad input is a Refused, not an exception."""
    try:
        return _run(tools, job)
    except AudioRefusedError as error:
        return Refused(str(error), "file")
    except ImageRefusedError as error:
        return Refused(str(error), "messages.content")
    except EncodeRefusedError as error:
        return Refused(error.message, error.param)
    except PromptTooLongError as error:
        return TooLong(error.min_tokens)
    except TooManyTokensError as error:
        return TooLong(error.num_tokens)
    except MemoryError:
        return Refused("this needs more memory than a prompt may take")


def _run(tools: Tools, job: ModelJob) -> Reply:
    encoder = tools.text
    match job:
        case EncodeText():
            return Encoded(pack_token_ids(encoder.encode_text(job)))
        case EncodeTexts():
            token_ids, second_start = encoder.encode_texts(job)
            return EncodedTexts(pack_token_ids(token_ids), second_start)
        case EncodeChat() if job.images:
            return _show(tools, job)
        case EncodeChat():
            return Encoded(pack_token_ids(encoder.encode_chat(job)))
        case DecodeTokens():
            ids = unpack_token_ids(job.token_ids).tolist()
            return Decoded(encoder.decode(ids, skip_special_tokens=job.skip_special_tokens))
        case ReadAudio():
            return _read_audio(tools.audio, job)


def _read_audio(reader: FeatureReader | None, job: ReadAudio) -> Reply:
    if reader is None:
        return Refused("this model reads no audio", "file")
    heard = reader.read(job.data)
    return AudioFeatures(SourceFeatures.of(heard.features), heard.duration_s)


def _show(tools: Tools, job: EncodeChat) -> Reply:
    reader = tools.images
    if reader is None:
        raise ImageRefusedError("this model's folder does not say how images are prepared")
    seen = reader.show(tools.text.encode_chat(job), job.images, job.max_tokens)
    return Seen(pack_token_ids(seen.token_ids), seen.spans, seen.images)


def _images_of(folder: Path, text: TextEncoder, ceilings: ImageCeilings) -> ImageReader | None:
    """Raises ModelLoadError where a client's text could pass for an image."""
    reader = image_reader_of(folder, ceilings)
    if reader is not None and not text.is_special(reader.placeholder_id):
        raise ModelLoadError("image_token_id of config.json is no special token of the tokenizer")
    return reader


def main(arguments: list[str]) -> None:
    """arguments: the model folder, the ceiling of a rendered conversation in bytes, ImageCeilings
    in JSON."""
    folder, max_rendered_bytes = Path(arguments[0]), int(arguments[1])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, hard))
    ceilings = msgspec.json.decode(arguments[2], type=ImageCeilings)
    replies = worker_loop.open_replies()
    try:
        text = TextEncoder(folder, max_rendered_bytes)
        tools = Tools(text, feature_reader_of(folder), _images_of(folder, text, ceilings))
    except ModelLoadError as error:
        worker_loop.send(replies, LoadFailed(str(error)))
        return
    worker_loop.send(replies, Ready())
    serve(tools, sys.stdin.buffer, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
