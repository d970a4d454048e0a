"""An adapter's folder: looked at when it is loaded, and known by what its files hold."""

import hashlib
from pathlib import Path

from workers.adapters.peft_config import CONFIG_FILE
from workers.adapters.peft_weights import WEIGHTS_FILE, check_fits, open_adapter
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

_KEY_BYTES = 16


def adapter_at(name: str, folder: Path, info: AdapterInfo) -> AdapterRef:
    """The adapter in a folder, under a name. info: of the engine that is to have it.

    Reads all of its files. Raises AdapterError where they cannot be served, with the reason.
    """
    with open_adapter(folder) as file:
        check_fits(file.pairs, info)
    return AdapterRef(name, str(folder), content_key(folder))


def content_key(folder: Path) -> str:
    """Of what an adapter's files hold. Raises AdapterError where they cannot be read."""
    key = hashlib.blake2b(digest_size=_KEY_BYTES)
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (folder / name).open("rb") as file:
                key.update(hashlib.file_digest(file, "blake2b").digest())
    except OSError as error:
        raise AdapterError(f"{error.filename} cannot be read: {error.strerror}") from error
    return key.hexdigest()
