"""A model's adapters as models that requests can name: each a handler over the model's own."""

from collections.abc import Callable, Iterator

from service.adapters.backend import AdaptedBackend
from service.adapters.shelf import AdapterShelf
from service.backend import GenerationBackend
from service.handler.directory import ServedModel
from service.handler.handler import Handler
from service.observability.adapter_metrics import AdapterMetrics
from workers.adapters.ref import AdapterRef


class ServedAdapters:
    """NamedAdapters of a shelf. handler, backend, is_ready: of the model."""

    def __init__(
        self,
        shelf: AdapterShelf,
        handler: Handler,
        backend: GenerationBackend,
        is_ready: Callable[[], bool],
        metrics: AdapterMetrics,
    ) -> None:
        self._shelf = shelf
        self._handler = handler
        self._backend = backend
        self._is_ready = is_ready
        self._metrics = metrics
        self._made: dict[AdapterRef, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return map(self._served, self._shelf)

    def find(self, name: str) -> ServedModel | None:
        adapter = self._shelf.find(name)
        return None if adapter is None else self._served(adapter)

    def _served(self, adapter: AdapterRef) -> ServedModel:
        if adapter not in self._made:
            self._made[adapter] = self._make(adapter)
            if len(self._made) > 2 * len(self._shelf):
                # What is no longer on the shelf is not kept. Seldom: a shelf may be long.
                self._made = {one: self._made[one] for one in self._shelf if one in self._made}
        return self._made[adapter]

    def _make(self, adapter: AdapterRef) -> ServedModel:
        handler = self._handler.over(
            AdaptedBackend(self._backend, adapter),
            self._metrics.of(adapter.name, self._handler.metrics),
        )
        name = adapter.name
        return ServedModel(name, handler, self._is_ready, root=name, parent=self._shelf.model)
