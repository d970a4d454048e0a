"""An adapter's folder: looked at when it is loaded, and known by what its files hold."""

import hashlib
from pathlib import Path

from workers.adapters.peft_config import CONFIG_FILE
from workers.adapters.peft_weights import WEIGHTS_FILE, check_fits, open_adapter
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

_KEY_BYTES = 16


def adapter_at(name: str, folder: Path, info: AdapterInfo) -> AdapterRef:
    """The adapter in a folder, under a name. folder: as somebody wrote it. info: of the engine that
    is to have it.

    Reads all of its files. Raises AdapterError where they cannot be served, with the reason.
    """
    folder = absolute(folder)
    with open_adapter(folder) as file:
        check_fits(file.pairs, info)
    return AdapterRef(name, str(folder), content_key(folder))


def absolute(folder: Path) -> Path:
    """Under which every process finds it. Raises AdapterError for what is no path."""
    try:
        return folder.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"the folder cannot be found: {error}") from error


def content_key(folder: Path) -> str:
    """Of what an adapter's files hold. Raises AdapterError where they cannot be read."""
    key = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with (folder / name).open("rb") as file:
                key.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            # Without the folder: clients are told.
            raise AdapterError(f"{name} cannot be read: {error.strerror}") from error
    return key.hexdigest()
