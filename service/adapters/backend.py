"""A model's backend for requests that have an adapter."""

import msgspec

from service.backend import GenerationBackend, TokenStream
from service.request_context import RequestContext
from workers.adapters.ref import AdapterRef
from workers.engine.protocol import GenerateRequest, ModelInfo


class AdaptedBackend:
    """A GenerationBackend. Answers carry the adapter's name in place of the model's."""

    def __init__(self, inner: GenerationBackend, adapter: AdapterRef) -> None:
        self._inner = inner
        self._adapter = adapter
        self._told: tuple[ModelInfo, ModelInfo] | None = None

    @property
    def info(self) -> ModelInfo:
        info = self._inner.info
        if self._told is None or self._told[0] is not info:
            self._told = info, msgspec.structs.replace(info, name=self._adapter.name)
        return self._told[1]

    def check_admission(self) -> None:
        self._inner.check_admission()

    async def submit(self, request: GenerateRequest, context: RequestContext) -> TokenStream:
        adapted = msgspec.structs.replace(request, adapter=self._adapter)
        return await self._inner.submit(adapted, context)
