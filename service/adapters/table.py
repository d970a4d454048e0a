"""Which adapters were loaded and unloaded since the start, as the control plane tells it to all
ingresses. Knows no folder and no Ray.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.adapters.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """The last word on a name. adapter: None: it is not served. is_configured: the configuration
    says something else of the name, so that this has to be remembered. folder_key: what the files
    of that name in the model's watched folder held, of an adapter that came from there, and of one
    that a call has unloaded since; "": the folder has nothing to do with it."""

    model: str
    name: str
    adapter: AdapterRef | None
    is_configured: bool = False
    folder_key: str = ""


def action_of(entry: AdapterEntry) -> str:
    """As the audit log calls it."""
    verb = "unload" if entry.adapter is None else "load"
    return f"{verb}_lora_adapter {entry.name}"


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Of two tables the one of the higher version counts. entries: one for each model and name.
    Names that come and go leave nothing behind."""

    version: int = 0
    entries: tuple[AdapterEntry, ...] = ()

    def find(self, model: str, name: str) -> AdapterEntry | None:
        found = (one for one in self.entries if (one.model, one.name) == (model, name))
        return next(found, None)

    def of_name(self, name: str) -> frozenset[AdapterEntry]:
        """Of all models."""
        return frozenset(one for one in self.entries if one.name == name)

    def with_entry(self, entry: AdapterEntry, version: int) -> "AdapterTable":
        others = [one for one in self.entries if (one.model, one.name) != (entry.model, entry.name)]
        is_needed = entry.adapter is not None or entry.is_configured or bool(entry.folder_key)
        return AdapterTable(version, (*others, entry) if is_needed else tuple(others))


class AdapterBoard:
    """The registry's own. A successor that knows nothing yet takes the table of an ingress."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.table = AdapterTable()
        self._clock_ns = clock_ns

    def set(self, entry: AdapterEntry, known: AdapterTable) -> AdapterTable:
        """known: what the caller was told last. A board that has lost its memory would otherwise
        make all others forget it, too."""
        self.restore(known)
        version = max(self.table.version + 1, self._clock_ns())
        self.table = self.table.with_entry(entry, version)
        return self.table

    def is_known(self, name: str, known: AdapterTable) -> bool:
        """Whether whoever was told `known` last knows the last word on a name, of every model."""
        return self.table.of_name(name) == known.of_name(name)

    def restore(self, table: AdapterTable) -> bool:
        """Whether it is newer than what was known."""
        is_newer = table.version > self.table.version
        if is_newer:
            self.table = table
        return is_newer
