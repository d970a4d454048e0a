"""safetensors checkpoints, single or sharded, read lazily: a slice that nobody takes costs nothing.

Refuses every other weight format: unpickling a file runs whatever its author put into it. Knows no
model.
"""

import json
import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workers.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


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
    """The weights of a model folder. Opening it reads headers only.

    Raises ModelLoadError when there are none, when they are pickled, or when a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names_of = _names_by_file(folder)
        self.total_bytes = sum((folder / file).stat().st_size for file in self._names_of)

    @property
    def names(self) -> set[str]:
        return {name for names in self._names_of.values() for name in names}

    @contextmanager
    def opened(self, wanted: Collection[str]) -> Iterator[dict[str, LazyTensor]]:
        """The wanted tensors by name, readable while the context lasts. All of them must exist."""
        with ExitStack() as files:
            tensors = {}
            for file, names in self._names_of.items():
                present = [name for name in names if name in wanted]
                if present:
                    handle = files.enter_context(_open(self._folder / file))
                    for name in present:
                        tensors[name] = LazyTensor(name, handle.get_slice(name))
            yield tensors

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of that name, which must exist, in host memory."""
        (file,) = (file for file, names in self._names_of.items() if name in names)
        with _open(self._folder / file) as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


def _names_in(path: Path) -> list[str]:
    with _open(path) as handle:
        return list(handle.keys())


def weight_file_names(folder: Path) -> list[str]:
    """Names of the safetensors files that make a folder's checkpoint, none of them opened.

    Raises ModelLoadError when there are none, when weights are pickled, or for a broken index.
    """
    if (folder / INDEX_FILE).is_file():
        return sorted(_indexed_names(folder / INDEX_FILE))
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise ModelLoadError(
            f"{folder} has pickled weights ({', '.join(pickled[:3])}), which can run code when "
            f"read and are refused; convert them to safetensors ({SINGLE_FILE})"
        )
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_names(index_path: Path) -> dict[str, list[str]]:
    """File -> names of its tensors, as a sharded checkpoint's index says."""
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text(encoding="utf-8"))[
            "weight_map"
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{index_path} is not a safetensors index: {error!r}") from error
    names_of: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names_of.setdefault(file, []).append(name)
    for file in names_of:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelLoadError(f"{index_path} names {file!r}, not a safetensors file beside it")
    return names_of


def _names_by_file(folder: Path) -> dict[str, list[str]]:
    """File -> names of its tensors; an index is held against the headers of the files it names."""
    files = weight_file_names(folder)
    if not (folder / INDEX_FILE).is_file():
        return {file: _names_in(folder / file) for file in files}
    names_of = _indexed_names(folder / INDEX_FILE)
    for file in files:
        if not (folder / file).is_file():
            raise ModelLoadError(f"{folder / INDEX_FILE} names {file}, which is missing")
        absent = set(names_of[file]) - set(_names_in(folder / file))
        if absent:
            raise ModelLoadError(f"{folder / file} lacks {', '.join(sorted(absent)[:5])}")
    return {file: names_of[file] for file in files}
