"""Large gRPC answers as bytes, put together a slice at a time: protobuf's own merging.

Messages of one type written one after another are one message: repeated fields go on, and a nested
message is its length and such bytes (protobuf's encoding, "Last One Wins" and "Packed Repeated
Fields"). So nobody waits until a million values have become messages.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import Message

from service.api.grpc_replies import choice_message, logprob_message, usage_message
from service.handler.collect import ChoiceResult
from service.handler.events import TokenLogprob, Usage
from service.handler.generation import GenerationInfo
from service.proto import inference_pb2 as pb

MAX_VALUES = 4096
"""Log probabilities in one slice."""
MAX_IDS = 1 << 14
_MAX_VECTORS = 64
_CHOICES = pb.GenerateResponse.DESCRIPTOR.fields_by_name["choices"].number
_EMBEDDINGS = pb.EmbedResponse.DESCRIPTOR.fields_by_name["embeddings"].number
_VALUES = pb.Embedding.DESCRIPTOR.fields_by_name["values"].number
_LENGTH_DELIMITED = 2


async def _made(slices: Iterator[bytes]) -> list[bytes]:
    """All of them; other tasks run between two."""
    made = []
    for piece in slices:
        made.append(piece)
        await asyncio.sleep(0)
    return made


async def response_bytes(
    info: GenerationInfo, results: list[ChoiceResult], usage: Usage, request: pb.GenerateRequest
) -> bytes:
    """A GenerateResponse. request: says what else the answer is to tell."""
    wants_prompt_logprobs = request.sampling.HasField("prompt_logprobs")
    made = [
        pb.GenerateResponse(
            id=info.request_id,
            model=info.model,
            created=info.created_s,
            usage=usage_message(usage),
        ).SerializeToString()
    ]
    if request.return_prompt_token_ids:
        for some in _slices(info.prompts[0], MAX_IDS):
            made.append(pb.GenerateResponse(prompt_token_ids=some).SerializeToString())
            await asyncio.sleep(0)
    for result in results:
        choice = await _made(_choice_slices(result, wants_prompt_logprobs))
        num_bytes = sum(map(len, choice))
        made.append(_header(_CHOICES, num_bytes))
        made += choice
    return b"".join(made)


async def embed_bytes(info: GenerationInfo, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """An EmbedResponse. Packed floats are what engines send: little-endian float32."""

    def slices() -> Iterator[bytes]:
        yield pb.EmbedResponse(
            id=info.request_id, model=info.model, created=info.created_s, usage=usage_message(usage)
        ).SerializeToString()
        for start in range(0, len(results), _MAX_VECTORS):
            yield b"".join(map(_embedding, results[start : start + _MAX_VECTORS]))

    return b"".join(await _made(slices()))


def _embedding(result: ChoiceResult) -> bytes:
    values = result.embedding
    head = _serialized(pb.Embedding(index=result.index)) + _header(_VALUES, len(values))
    return _header(_EMBEDDINGS, len(head) + len(values)) + head + values


async def tokenize_bytes(
    token_ids: Sequence[int],
    max_context_tokens: int,
    token_bytes: Callable[[Sequence[int]], list[bytes]] | None,
) -> bytes:
    """A TokenizeResponse. token_bytes: for `tokens`; None leaves them out."""

    def slices() -> Iterator[bytes]:
        yield pb.TokenizeResponse(max_context_tokens=max_context_tokens).SerializeToString()
        for some in _slices(token_ids, MAX_IDS):
            yield pb.TokenizeResponse(token_ids=some).SerializeToString()
            if token_bytes is not None:
                yield pb.TokenizeResponse(tokens=token_bytes(some)).SerializeToString()

    return b"".join(await _made(slices()))


def _choice_slices(result: ChoiceResult, wants_prompt_logprobs: bool) -> Iterator[bytes]:
    yield _serialized(choice_message(result, result.text))
    for some in _slices(result.token_ids, MAX_IDS):
        yield _serialized(pb.Choice(token_ids=some))
    for entries in _by_values(result.logprobs):
        yield _serialized(pb.Choice(logprobs=map(logprob_message, entries)))
    for entries in _by_values(result.prompt_logprobs):
        if wants_prompt_logprobs:
            yield _serialized(pb.Choice(prompt_logprobs=map(logprob_message, entries)))
        else:
            yield b""


def _serialized(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _slices(values: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(values), length):
        yield values[start : start + length]


def _by_values(entries: list[TokenLogprob] | None) -> Iterator[list[TokenLogprob]]:
    """Slices, some of them empty; the list is emptied at the end."""
    if entries:
        length = max(1, MAX_VALUES // (1 + len(entries[-1].top)))
        for start in range(0, len(entries), length):
            yield entries[start : start + length]
        # A million objects take long to free.
        while entries:
            del entries[-length:]
            yield []


def _header(number: int, num_bytes: int) -> bytes:
    """What comes before that many bytes of a field."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
