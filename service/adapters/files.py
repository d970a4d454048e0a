"""Adapters that the configuration names, looked at before anything is served."""

import os
from collections.abc import Mapping
from pathlib import Path

from service.adapters.paths import UNTELLABLE, is_tellable
from workers.adapters.folder import absolute, content_key
from workers.adapters.peft_weights import check_ranks, read_pairs
from workers.adapters.ref import AdapterRef
from workers.errors import AdapterError, ConfigError


def configured_adapters(folders: Mapping[str, str], max_rank: int) -> dict[str, AdapterRef]:
    """folders: by name. max_rank: that the model's engine takes; whether their modules are the
    model's it says, when it is asked for one.

    Raises ConfigError for files that cannot be read or that are served with no model.
    """
    return {name: _adapter(name, folder, max_rank) for name, folder in folders.items()}


def watched_folder(stated: str | None) -> Path | None:
    """Of engine.lora_folder, as every process finds it; None where there is none. Raises
    ConfigError for one that cannot be read."""
    if stated is None:
        return None
    try:
        folder = absolute(Path(stated))
        os.listdir(folder)
    except (AdapterError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"engine.lora_folder: {stated}: {reason}") from error
    return folder


def _adapter(name: str, stated: str, max_rank: int) -> AdapterRef:
    try:
        folder = absolute(Path(stated))
        if not is_tellable(str(folder)):
            raise AdapterError(UNTELLABLE)
        check_ranks(read_pairs(folder), max_rank)
        return AdapterRef(name, str(folder), content_key(folder))
    except AdapterError as error:
        raise ConfigError(f"engine.lora.{name}: {stated}: {error}") from error
