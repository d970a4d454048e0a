"""An adapter's folder: looked at when it is loaded, and known by what its files hold."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from workers.adapters.peft_config import CONFIG_FILE, read_config_bytes
from workers.adapters.peft_weights import (
    WEIGHTS_FILE,
    check_fits,
    read_pairs,
    reading_weights,
)
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

_KEY_BYTES = 16


def adapter_at(name: str, folder: Path, info: AdapterInfo) -> AdapterRef:
    """The adapter in a folder, under a name. folder: as somebody wrote it. info: of the engine that
    is to have it.

    Reads all of its files. Raises AdapterError where they cannot be served, with the reason.
    """
    folder = absolute(folder)
    check_fits(read_pairs(folder), info)
    return AdapterRef(name, str(folder), content_key(folder))


def absolute(folder: Path) -> Path:
    """Under which every process finds it. Raises AdapterError for what is no path."""
    try:
        return folder.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"the folder cannot be found: {error}") from error


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """What the files of a folder held when they were read, each as a whole: whoever writes to them
    now changes nothing here."""

    config: bytes
    weights: bytes

    @classmethod
    def read(cls, folder: Path) -> "AdapterBytes":
        """Raises AdapterError where they cannot be read."""
        config = read_config_bytes(folder)
        with reading_weights():
            return cls(config, (folder / WEIGHTS_FILE).read_bytes())

    @property
    def key(self) -> str:
        return _key(*(hashlib.blake2b(one).digest() for one in (self.config, self.weights)))


def content_key(folder: Path) -> str:
    """The key of AdapterBytes, for which no file is ever whole in memory. Raises AdapterError
    where they cannot be read."""
    digests = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with (folder / name).open("rb") as file:
                digests.append(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            # Without the folder: clients are told.
            raise AdapterError(f"{name} cannot be read: {error.strerror}") from error
    return _key(*digests)


def _key(*digests: bytes) -> str:
    """Of the files, in a fixed order."""
    return hashlib.blake2b(b"".join(digests), digest_size=_KEY_BYTES).hexdigest()
