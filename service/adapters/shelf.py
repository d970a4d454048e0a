"""The adapters of one model in one ingress, by the names that clients write."""

from collections.abc import Iterator, Mapping

from service.adapters.table import AdapterEntry, AdapterTable
from workers.adapters.ref import AdapterRef


class AdapterShelf:
    """configured: adapters that are there from the start, by name. has_folder: whether a folder is
    watched for more of them; what an earlier deployment's has left in the table is none of ours."""

    def __init__(
        self, model: str, configured: Mapping[str, AdapterRef], *, has_folder: bool = False
    ) -> None:
        self.model = model
        self._has_folder = has_folder
        self._configured = dict(configured)
        self._adapters = dict(configured)

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter(self._adapters.values())

    def __len__(self) -> int:
        return len(self._adapters)

    def is_configured(self, name: str) -> bool:
        """Whether it is there from the start."""
        return name in self._configured

    def find(self, name: str) -> AdapterRef | None:
        return self._adapters.get(name)

    def take(self, table: AdapterTable) -> None:
        """What was loaded and unloaded since the start, of all models."""
        adapters = dict(self._configured)
        for entry in table.entries:
            if entry.model != self.model or not self._counts(entry):
                continue
            adapters.pop(entry.name, None)
            if entry.adapter is not None:
                adapters[entry.name] = entry.adapter
        self._adapters = adapters

    def _counts(self, entry: AdapterEntry) -> bool:
        """The configuration comes before the folder."""
        if not entry.folder_key:
            return True
        return self._has_folder and entry.name not in self._configured
