"""safetensors checkpoints, single or sharded, read lazily: a slice that nobody takes costs nothing.

Refuses every other kind of file: unpickling a file runs whatever its author put into it. Knows no
model.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workers.errors import ModelLoadError
from workers.loading.names import unwrapped
from workers.loading.weight_files import INDEX_FILE, indexed_file_names, weight_file_names

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# Of a causal model's names; what the body calls its embedding.
_BODY, _BODY_EMBEDDING = "model.", "embed_tokens.weight"


class LazyTensor:
    """A tensor in a safetensors file; satisfies TensorSource.

    A slice is a view of the mapped file: nothing is read before somebody looks at its elements.
    Slices may be taken by several threads.
    """

    def __init__(self, name: str, file_slice: Any) -> None:
        self._name = name
        self._slice = file_slice
        self.shape: tuple[int, ...] = tuple(file_slice.get_shape())
        dtype = file_slice.get_dtype()
        if dtype not in _DTYPES:
            raise ModelLoadError(f"{name} has dtype {dtype}; served are {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[dtype]
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        try:
            part: torch.Tensor = self._slice[index]
        except SafetensorError as error:
            raise ModelLoadError(f"{self._name} cannot be read: {error}") from error
        return part


class SafetensorsCheckpoint:
    """The weights of a model folder, by the names that a causal model has for them: a folder with
    its body alone, as sentence-transformers saves it, lacks their prefix, and one of a model for
    images and text has the causal model within. Opening it reads headers only.

    keeps_names: of what is no causal model; tensors have the names that they are stored by. Raises
    ModelLoadError when there are none, when they are pickled, or when a file is damaged.
    """

    def __init__(self, folder: Path, *, keeps_names: bool = False) -> None:
        self._folder = folder
        names_of = _names_by_file(folder)
        self._stored_names = (
            {file: {name: name for name in names} for file, names in names_of.items()}
            if keeps_names
            else _names_within_files(names_of)
        )
        self.total_bytes = sum((folder / file).stat().st_size for file in self._stored_names)

    @property
    def names(self) -> set[str]:
        return {name for names in self._stored_names.values() for name in names}

    @contextmanager
    def opened(self, wanted: Collection[str]) -> Iterator[dict[str, LazyTensor]]:
        """The wanted tensors by name, readable while the context lasts. All of them must exist."""
        with ExitStack() as files:
            tensors = {}
            for file, names in self._stored_names.items():
                present = {name: stored for name, stored in names.items() if name in wanted}
                if present:
                    handle = files.enter_context(_open(self._folder / file))
                    for name, stored in present.items():
                        tensors[name] = LazyTensor(stored, handle.get_slice(stored))
            yield tensors

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of that name, which must exist, in host memory."""
        ((file, stored),) = (
            (file, names[name]) for file, names in self._stored_names.items() if name in names
        )
        with _open(self._folder / file) as handle:
            tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor


def _names_within_files(names_of: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """File -> a causal model's name of each of its tensors -> its name there."""
    prefix = _missing_prefix({name for names in names_of.values() for name in names})
    stored_names = {
        file: {unwrapped(prefix + name): name for name in names} for file, names in names_of.items()
    }
    first: dict[str, str] = {}
    for stored in sorted(name for names in names_of.values() for name in names):
        name = unwrapped(prefix + stored)
        if name in first:
            raise ModelLoadError(f"{first[name]} and {stored} both are {name} of a causal model")
        first[name] = stored
    return stored_names


def _missing_prefix(names: set[str]) -> str:
    is_body = _BODY_EMBEDDING in names and not any(name.startswith(_BODY) for name in names)
    return _BODY if is_body else ""


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


def _names_in(path: Path) -> list[str]:
    with _open(path) as handle:
        return list(handle.keys())


def _names_by_file(folder: Path) -> dict[str, list[str]]:
    """File -> names of its tensors; an index is held against the headers of the files it names."""
    files = weight_file_names(folder)
    if not (folder / INDEX_FILE).is_file():
        return {file: _names_in(folder / file) for file in files}
    names_of = indexed_file_names(folder / INDEX_FILE)
    for file in files:
        if not (folder / file).is_file():
            raise ModelLoadError(f"{folder / INDEX_FILE} names {file}, which is missing")
        absent = set(names_of[file]) - set(_names_in(folder / file))
        if absent:
            raise ModelLoadError(f"{folder / file} lacks {', '.join(sorted(absent)[:5])}")
    return {file: names_of[file] for file in files}
