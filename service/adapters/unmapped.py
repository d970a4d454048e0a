"""An adapter in a folder that others write to, read without mapping a file: whoever shortens a
mapped one meanwhile ends the process. Without torch.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from workers.adapters.folder import absolute, content_key
from workers.adapters.peft_config import PeftConfig
from workers.adapters.peft_weights import WEIGHTS_FILE, check_fits, pairs_of, reading_weights
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own bound."""
_FREE_HEADER_BYTES = 1 << 20
"""Also of all that is said beside tensors."""
_TENSOR_HEADER_BYTES = 256
"""PEFT needs up to 180. Other threads wait while a header is decoded."""
_METADATA = "__metadata__"
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Of a number, by safetensors' types."""


def unmapped_adapter(name: str, folder: Path, info: AdapterInfo) -> AdapterRef:
    """As adapter_at. Raises AdapterError where it cannot be served, from an OSError where that was
    none of the files' contents."""
    folder = absolute(folder)
    config, path = PeftConfig.read(folder), folder / WEIGHTS_FILE
    with reading_weights():
        if not path.is_file():
            raise AdapterError(f"there is no {WEIGHTS_FILE}; pickled weights are not read")
        with path.open("rb") as file:
            headers = HeadersInMemory.read(file, max_header_bytes(info))
    check_fits(pairs_of(config, headers), info)
    return AdapterRef(name, str(folder), content_key(folder))


def max_header_bytes(info: AdapterInfo) -> int:
    """That any adapter's file needs which such a model takes: two matrices for each module."""
    num_modules = len(info.modules) + sum(3 * one.num_experts for one in info.experts)
    num_bytes = _FREE_HEADER_BYTES + 2 * num_modules * _TENSOR_HEADER_BYTES
    return min(num_bytes, _MAX_HEADER_BYTES)


class _Stated(msgspec.Struct, frozen=True):
    """A tensor, as a header has it. data_offsets: behind the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    @property
    def num_bits(self) -> int | None:
        """That its numbers take; None for an unknown type."""
        bits = _BITS.get(self.dtype)
        return None if bits is None else bits * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class HeadersInMemory:
    """TensorHeaders of a safetensors file that is whole."""

    tensors: dict[str, _Stated]

    @classmethod
    def read(cls, file: BinaryIO, max_bytes: int = _MAX_HEADER_BYTES) -> "HeadersInMemory":
        """max_bytes: of the header. Raises AdapterError for what is no such file, or only its
        beginning."""
        num_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + header_bytes
        if begin > num_bytes:
            raise AdapterError(f"{WEIGHTS_FILE} cannot be read: its header is not whole")
        if header_bytes > max_bytes:
            raise AdapterError(
                f"{WEIGHTS_FILE} cannot be read: its header has {header_bytes} bytes, more than "
                f"the {max_bytes} that the model's modules need"
            )
        tensors = _tensors(file.read(header_bytes))
        end = begin + _end_of(tensors)
        if end != num_bytes:
            raise AdapterError(
                f"{WEIGHTS_FILE} cannot be read: it has {num_bytes} bytes, its header says {end}"
            )
        return cls(tensors)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> _Stated:
        return self.tensors[name]


def _tensors(header: bytes) -> dict[str, _Stated]:
    try:
        stated = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = stated.get(_METADATA, b"null")
        if len(memoryview(metadata)) > _FREE_HEADER_BYTES:
            raise AdapterError(f"{WEIGHTS_FILE} cannot be read: its {_METADATA} is too long")
        msgspec.json.decode(metadata, type=dict[str, str] | None)
        return {
            name: msgspec.json.decode(raw, type=_Stated)
            for name, raw in stated.items()
            if name != _METADATA
        }
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from error


def _end_of(tensors: Mapping[str, _Stated]) -> int:
    """Behind the header. Raises AdapterError unless tensors lie one behind the other, each with as
    many bytes as its shape says, as safetensors itself demands."""
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin = end
        end = one.data_offsets[1]
        if one.data_offsets[0] != begin or one.num_bits != 8 * (end - begin):
            raise AdapterError(
                f"{WEIGHTS_FILE} cannot be read: its header says of {name} what its shape, its "
                "type or the tensor before it contradicts"
            )
    return end
