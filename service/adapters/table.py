"""Which adapters were loaded and unloaded since the start, as the control plane tells it to all
ingresses. Knows no folder and no Ray.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class AdapterTable:
    """Of two tables the one of the higher version counts. entries: one for each model and name.
    Names that come and go leave nothing behind."""

    version: int = 0
    entries: tuple[AdapterEntry, ...] = ()

    def __reduce__(self) -> tuple[type["AdapterTable"], tuple[int, tuple[AdapterEntry, ...]]]:
        """Without what is derived of the entries: tables go to other processes."""
        return AdapterTable, (self.version, self.entries)

    @cached_property
    def _by_model_and_name(self) -> Mapping[tuple[str, str], AdapterEntry]:
        return {(one.model, one.name): one for one in self.entries}

    @cached_property
    def _by_name(self) -> Mapping[str, frozenset[AdapterEntry]]:
        found: dict[str, list[AdapterEntry]] = {}
        for one in self.entries:
            found.setdefault(one.name, []).append(one)
        return {name: frozenset(entries) for name, entries in found.items()}

    def find(self, model: str, name: str) -> AdapterEntry | None:
        return self._by_model_and_name.get((model, name))

    def of_name(self, name: str) -> frozenset[AdapterEntry]:
        """Of all models."""
        return self._by_name.get(name, frozenset())

    def with_entries(self, entries: Sequence[AdapterEntry], version: int) -> "AdapterTable":
        """entries: one for each model and name."""
        said = {(one.model, one.name) for one in entries}
        others = (one for one in self.entries if (one.model, one.name) not in said)
        needed = (
            one for one in entries if one.adapter is not None or one.is_configured or one.folder_key
        )
        return AdapterTable(version, (*others, *needed))


class AdapterBoard:
    """The registry's own. A successor that knows nothing yet takes the table of an ingress."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.table = AdapterTable()
        self._clock_ns = clock_ns

    def set(self, entries: Sequence[AdapterEntry], known: AdapterTable) -> AdapterTable:
        """entries: one for each model and name. known: what the caller was told last. A board that
        has lost its memory would otherwise make all others forget it, too."""
        self.restore(known)
        version = max(self.table.version + 1, self._clock_ns())
        self.table = self.table.with_entries(entries, version)
        return self.table

    def news(
        self, entries: Sequence[AdapterEntry], known: AdapterTable
    ) -> tuple[AdapterEntry, ...]:
        """Those of whose names whoever was told `known` last knows the last word, of every
        model."""
        self.restore(known)
        of_name = self.table.of_name
        return tuple(one for one in entries if of_name(one.name) == known.of_name(one.name))

    def restore(self, table: AdapterTable) -> bool:
        """Whether it is newer than what was known."""
        is_newer = table.version > self.table.version
        if is_newer:
            self.table = table
        return is_newer
