"""Which files of a model folder an engine reads, and what tells one state of a folder from another.

Looks at names, sizes and times; opens nothing but the index of a sharded checkpoint.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workers.errors import ModelLoadError
from workers.loading.weight_files import weight_file_names

_SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_DIGEST_CHARACTERS = 16


class ModelFile(NamedTuple):
    """name: inside the folder. modified_ns: of the contents, by the file system's clock."""

    name: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one state of a folder: its weights and the small ones beside them.

    folder: with links resolved. A file that is written anew makes another state.
    """

    folder: Path
    files: tuple[ModelFile, ...]

    @classmethod
    def of(cls, folder: Path) -> "ModelFiles":
        """Raises ModelLoadError where there are no weights to serve, or one cannot be looked at."""
        resolved = folder.resolve()
        try:
            return cls(resolved, tuple(_files(resolved)))
        except OSError as error:
            raise ModelLoadError(f"{folder} cannot be read: {error}") from error

    @property
    def total_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def key(self) -> str:
        """The folder's name and a digest of where it is and of every file's size and time."""
        text = "\0".join([str(self.folder), *(repr(tuple(file)) for file in self.files)])
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.folder.name).lstrip(".") or "model"
        return f"{name[:64]}-{digest[:_DIGEST_CHARACTERS]}"


def _files(folder: Path) -> Iterator[ModelFile]:
    weights = weight_file_names(folder)
    small = {path.name for path in folder.iterdir() if path.suffix in _SMALL_SUFFIXES}
    for name in sorted({*weights, *small}):
        path = folder / name
        if path.is_file():
            status = path.stat()
            yield ModelFile(name, status.st_size, status.st_mtime_ns)
        elif name in weights:
            raise ModelLoadError(f"{folder} lacks {name}")
