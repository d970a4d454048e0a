"""An adapter in a folder that others write to, read without mapping a file: whoever shortens a
mapped one meanwhile ends the process. Without torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from workers.adapters.folder import absolute, content_key
from workers.adapters.peft_config import PeftConfig
from workers.adapters.peft_weights import WEIGHTS_FILE, check_fits, pairs_of, reading_weights
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound
_METADATA = "__metadata__"


def unmapped_adapter(name: str, folder: Path, info: AdapterInfo) -> AdapterRef:
    """As adapter_at. Raises AdapterError where it cannot be served, from an OSError where that was
    none of the files' contents."""
    folder = absolute(folder)
    config, path = PeftConfig.read(folder), folder / WEIGHTS_FILE
    with reading_weights():
        if not path.is_file():
            raise AdapterError(f"there is no {WEIGHTS_FILE}; pickled weights are not read")
        with path.open("rb") as file:
            headers = HeadersInMemory.read(file)
    check_fits(pairs_of(config, headers), info)
    return AdapterRef(name, str(folder), content_key(folder))


class _Stated(msgspec.Struct, frozen=True):
    """A tensor, as a header has it. data_offsets: behind the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


@dataclass(frozen=True, slots=True)
class HeadersInMemory:
    """TensorHeaders of a safetensors file that is whole."""

    tensors: dict[str, _Stated]

    @classmethod
    def read(cls, file: BinaryIO) -> "HeadersInMemory":
        """Raises AdapterError for what is no such file, or only its beginning."""
        num_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + header_bytes
        if header_bytes > _MAX_HEADER_BYTES or begin > num_bytes:
            raise AdapterError(f"{WEIGHTS_FILE} cannot be read: its header is not whole")
        tensors = _tensors(file.read(header_bytes))
        end = begin + max((one.data_offsets[1] for one in tensors.values()), default=0)
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
        return {
            name: msgspec.json.decode(raw, type=_Stated)
            for name, raw in stated.items()
            if name != _METADATA
        }
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
