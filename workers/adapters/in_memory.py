"""The tensors of a safetensors file that was read as a whole.

A mapped one would end the process if somebody shortened the file meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import deserialize

from workers.adapters.peft_weights import reading_weights

# The package says no types of it.
_parsed: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A TensorHeader with its values."""

    dtype: str
    shape: list[int]
    data: bytearray

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class TensorsInMemory:
    """TensorHeaders of data, with the values."""

    def __init__(self, data: bytes) -> None:
        """Raises AdapterError where these are no tensors."""
        with reading_weights():
            self._tensors = {name: _Tensor(**fields) for name, fields in _parsed(data)}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Tensor:
        return self._tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """Of a matrix of floats that are served."""
        found = self._tensors[name]
        return torch.frombuffer(found.data, dtype=_DTYPES[found.dtype]).view(found.shape)
