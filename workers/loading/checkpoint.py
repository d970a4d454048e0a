"""safetensors checkpoints, single or sharded, read lazily: a slice that nobody takes costs nothing.

Refuses every other weight format: unpickling a file runs whatever its author put into it. Knows no
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
from workers.loading.weight_files import INDEX_FILE, indexed_file_names, weight_file_names

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
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
        if dtype not in _DTYPE_BYTES:
            raise ModelLoadError(
                f"{name} has dtype {dtype}; served are {', '.join(_DTYPE_BYTES)}, unquantised"
            )
        self.num_bytes = math.prod(self.shape) * _DTYPE_BYTES[dtype]

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        try:
            part: torch.Tensor = self._slice[index]
        except SafetensorError as error:
            raise ModelLoadError(f"{self._name} cannot be read: {error}") from error
        return part


class SafetensorsCheckpoint:
    """The weights of a model folder, by the names that a causal model has for them: a folder with
    its body alone, as sentence-transformers saves it, lacks their prefix. Opening it reads headers
    only.

    Raises ModelLoadError when there are none, when they are pickled, or when a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names_of = _names_by_file(folder)
        self._prefix = _missing_prefix({n for names in self._names_of.values() for n in names})
        self.total_bytes = sum((folder / file).stat().st_size for file in self._names_of)

    @property
    def names(self) -> set[str]:
        return {self._prefix + name for names in self._names_of.values() for name in names}

    @contextmanager
    def opened(self, wanted: Collection[str]) -> Iterator[dict[str, LazyTensor]]:
        """The wanted tensors by name, readable while the context lasts. All of them must exist."""
        with ExitStack() as files:
            tensors = {}
            for file, names in self._names_of.items():
                present = [name for name in names if self._prefix + name in wanted]
                if present:
                    handle = files.enter_context(_open(self._folder / file))
                    for name in present:
                        tensors[self._prefix + name] = LazyTensor(name, handle.get_slice(name))
            yield tensors

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of that name, which must exist, in host memory."""
        name = name.removeprefix(self._prefix)
        (file,) = (file for file, names in self._names_of.items() if name in names)
        with _open(self._folder / file) as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


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
