"""What a serialised protobuf message holds, judged before anything is built from it.

A parser makes an object of every value, with the interpreter lock held: eight megabytes of token
ids or of empty messages stop an event loop for a quarter of a second. So items are counted on the
wire, a slice at a time, and fields that are not known are refused where they stand.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from service.errors import ApiError, ApiErrorCode
from service.limits import MAX_ITEMS
from service.proto import inference_pb2 as pb

MAX_FIELDS = 1 << 15
"""Of one message, those of the messages inside it included."""
_FIELDS_PER_TURN = 2048
_BYTES_PER_TURN = 1 << 20
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_TOKEN_IDS = frozenset(
    {
        pb.TokenIds.DESCRIPTOR.fields_by_name["ids"].full_name,
        pb.DetokenizeRequest.DESCRIPTOR.fields_by_name["token_ids"].full_name,
    }
)


class _Field(NamedTuple):
    """inside: of the messages it holds; None if it holds none. is_packed: may be packed numbers."""

    name: str
    full_name: str
    wire_types: frozenset[int]
    inside: Any
    is_repeated: bool
    is_packed: bool


async def check_wire(data: bytes, descriptor: Any, max_tokens: int) -> None:
    """descriptor: of the message that `data` is to be. max_tokens: ids of one request.

    Raises ApiError if it is broken, has too many items of a kind, or fields that are not known.
    """
    for _ in _Walk(data, max_tokens).message(descriptor, 0, len(data)):
        await asyncio.sleep(0)


class _Walk:
    """Generators give way from time to time."""

    def __init__(self, data: bytes, max_tokens: int) -> None:
        self._data = data
        self._max_tokens = max_tokens
        self._counts: Counter[str] = Counter()
        self._num_fields = 0

    def message(self, descriptor: Any, start: int, stop: int) -> Iterator[None]:
        fields = _fields(descriptor)
        while start < stop:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise _over_limit("the message", MAX_FIELDS, "fields")
            if self._num_fields % _FIELDS_PER_TURN == 0:
                yield
            tag, start = self._varint(start, stop, descriptor)
            field = fields.get(tag >> 3)
            if field is None or tag & 7 not in field.wire_types:
                name = descriptor.name
                message = f"{name} has no field number {tag >> 3} of that type"
                raise ApiError(ApiErrorCode.UNKNOWN_PARAMETER, message, name)
            begin, start = self._extent(tag & 7, start, stop, descriptor)
            if field.is_packed and tag & 7 == _LENGTH_DELIMITED:
                yield from self._packed(field, begin, start)
            elif field.is_repeated:
                self._count(field, 1)
            if field.inside is not None:
                yield from self.message(field.inside, begin, start)

    def _extent(self, wire_type: int, start: int, stop: int, descriptor: Any) -> tuple[int, int]:
        """Where a value begins and ends."""
        if wire_type == _VARINT:
            return start, self._varint(start, stop, descriptor)[1]
        size = _FIXED_BYTES.get(wire_type)
        if size is None:
            size, start = self._varint(start, stop, descriptor)
        if start + size > stop:
            raise _broken(descriptor)
        return start, start + size

    def _varint(self, start: int, stop: int, descriptor: Any) -> tuple[int, int]:
        """The value and where it ends."""
        value = shift = 0
        for position in range(start, min(stop, start + 10)):
            byte = self._data[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position + 1
            shift += 7
        raise _broken(descriptor)

    def _packed(self, field: _Field, start: int, stop: int) -> Iterator[None]:
        for begin in range(start, stop, _BYTES_PER_TURN):
            some = np.frombuffer(self._data, np.uint8, min(_BYTES_PER_TURN, stop - begin), begin)
            # Each varint has one byte without its highest bit, the last.
            self._count(field, int(np.count_nonzero(some < 0x80)))
            if stop - begin > _BYTES_PER_TURN:
                yield

    def _count(self, field: _Field, number: int) -> None:
        ceiling = self._max_tokens if field.full_name in _TOKEN_IDS else MAX_ITEMS
        self._counts[field.full_name] += number
        if self._counts[field.full_name] > ceiling:
            raise _over_limit(field.name, ceiling, "items")


@cache
def _fields(descriptor: Any) -> dict[int, _Field]:
    """By number."""
    return {field.number: _field(field) for field in descriptor.fields}


def _field(field: Any) -> _Field:
    """Packed numbers of this service are varints."""
    wire_type = _WIRE_TYPES.get(field.type, _VARINT)
    is_packed = field.is_repeated and wire_type == _VARINT
    return _Field(
        name=field.name,
        full_name=field.full_name,
        wire_types=frozenset({wire_type, _LENGTH_DELIMITED} if is_packed else {wire_type}),
        inside=field.message_type,
        is_repeated=field.is_repeated,
        is_packed=is_packed,
    )


_KINDS: Any = next(iter(pb.TokenIds.DESCRIPTOR.fields))
_WIRE_TYPES = {
    _KINDS.TYPE_STRING: 2,
    _KINDS.TYPE_BYTES: 2,
    _KINDS.TYPE_MESSAGE: 2,
    _KINDS.TYPE_DOUBLE: 1,
    _KINDS.TYPE_FIXED64: 1,
    _KINDS.TYPE_SFIXED64: 1,
    _KINDS.TYPE_FLOAT: 5,
    _KINDS.TYPE_FIXED32: 5,
    _KINDS.TYPE_SFIXED32: 5,
}


def _broken(descriptor: Any) -> ApiError:
    message = f"the message is not a {descriptor.name}"
    return ApiError(ApiErrorCode.INVALID_REQUEST, message)


def _over_limit(name: str, ceiling: int, of_what: str) -> ApiError:
    return ApiError(
        ApiErrorCode.LIMIT_EXCEEDED, f"{name} may have at most {ceiling} {of_what}", name
    )
