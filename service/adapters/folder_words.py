"""What a watched folder has to say of names: it comes after models, configuration and calls."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from service.adapters.control import NAME_PATTERN
from service.adapters.folder_reader import FolderContents
from service.adapters.shelf import AdapterShelf
from service.adapters.table import AdapterEntry, AdapterTable
from workers.adapters.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class FolderWords:
    """entries: that the table lacks. left_out: why, by names that somebody else has. is_doubted:
    adapters are served that are not there, of a folder of which that may not be believed."""

    entries: tuple[AdapterEntry, ...]
    left_out: Mapping[str, str]
    is_doubted: bool = False


def folder_words(
    model: str,
    contents: FolderContents,
    shelves: Mapping[str, AdapterShelf],
    table: AdapterTable,
) -> FolderWords:
    """model: whose folder it is. shelves: by model."""
    left_out: dict[str, str] = {}
    entries: list[AdapterEntry] = []
    for name, adapter in contents.adapters.items():
        reason = _taken(model, name, shelves, table)
        if reason is not None:
            left_out[name] = reason
        elif not _is_said(table.find(model, name), adapter):
            entries.append(AdapterEntry(model, name, adapter, folder_key=adapter.key))
    there = (contents.adapters.keys() | contents.kept) - left_out.keys()
    gone = [
        AdapterEntry(model, one.name, None)
        for one in table.entries
        if one.model == model and one.folder_key and one.name not in there
    ]
    if contents.is_doubted:
        return FolderWords(tuple(entries), left_out, is_doubted=bool(gone))
    return FolderWords((*entries, *gone), left_out)


def _is_said(entry: AdapterEntry | None, adapter: AdapterRef) -> bool:
    """Or a call has unloaded just these files."""
    if entry is None:
        return False
    is_unloaded = entry.adapter is None and entry.folder_key == adapter.key
    return is_unloaded or entry.adapter == adapter


def _taken(
    model: str, name: str, shelves: Mapping[str, AdapterShelf], table: AdapterTable
) -> str | None:
    """Why the folder's adapter cannot have the name; None: it can."""
    if not re.fullmatch(NAME_PATTERN, name):
        return "a name is 1 to 128 letters, digits, dots, _ or -"
    if name in shelves:
        return "a model is called so"
    if any(shelf.is_configured(name) for shelf in shelves.values()):
        return "the configuration has an adapter of that name (engine.lora)"
    for entry in table.of_name(name):
        if entry.adapter is not None and not entry.folder_key:
            return "a call has loaded an adapter of that name"
        if entry.adapter is not None and entry.model != model:
            return f"the folder of {entry.model!r} has an adapter of that name"
    return None
