"""What a folder of adapters looks like from outside: which subfolders, sizes and times of their
files. Reads no file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.adapters.paths import UNTELLABLE, is_tellable
from workers.adapters.peft_config import CONFIG_FILE
from workers.adapters.peft_weights import WEIGHTS_FILE

FileLook = tuple[int, int, int, int]
"""Size in bytes, time of the contents' and of the inode's change in ns, number of the inode: who
puts a file in place of another may give it the size and the time of that one."""


@dataclass(frozen=True, slots=True)
class SubfolderLook:
    """folder: where links lead. files: size in bytes and times of change in ns of each, and which
    inode it is, None for one that is missing. trouble: why it could not be looked at, else ""."""

    folder: str
    files: tuple[FileLook | None, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class FolderLook:
    """device: of the file system. subfolders: by name, those that have a config."""

    device: int
    subfolders: Mapping[str, SubfolderLook]


def look_at(folder: Path) -> FolderLook:
    """Raises OSError where the folder itself cannot be read."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    looks = {name: look_at_subfolder(folder / name) for name in names}
    found = {name: look for name, look in looks.items() if look is not None}
    return FolderLook(folder.stat().st_dev, found)


def look_at_subfolder(folder: Path) -> SubfolderLook | None:
    """None where there is no adapter."""
    try:
        files = (_look_at_file(folder / CONFIG_FILE), _look_at_file(folder / WEIGHTS_FILE))
        if files[0] is None:
            return None
        found = str(folder.resolve())
        if not (is_tellable(folder.name) and is_tellable(found)):
            return SubfolderLook(found, files, UNTELLABLE)
        return SubfolderLook(found, files)
    except (OSError, RuntimeError) as error:
        # RuntimeError: links that lead in a circle.
        reason = error.strerror if isinstance(error, OSError) else error
        return SubfolderLook(str(folder), trouble=f"it cannot be looked at: {reason}")


def _look_at_file(file: Path) -> FileLook | None:
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
