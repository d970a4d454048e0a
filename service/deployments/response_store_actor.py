"""The store of responses as an actor of the application, and as its ingresses call it.

On Ray's head node, since follow-up calls come to any ingress. It is called when a response begins,
ends or is looked up, never for a token. What clients have said passes it as bytes; it is lost with
its process.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import ray

from service.deployments.control_plane import (
    ActorHandle,
    get_or_create,
    on_the_head,
    store_name,
)
from service.errors import ApiError, ApiErrorCode
from service.response_store.records import (
    BegunResponse,
    EndedResponse,
    ResponseName,
    StoredResponse,
    StoreLimits,
)
from service.response_store.store import LocalResponseStore

T = TypeVar("T")
_TIMEOUT_S = 5.0
_MAX_CALLS = 1000


class ResponseStoreActor(LocalResponseStore):
    """All of its methods are called from ingresses."""

    async def limit_to(self, limits: StoreLimits) -> None:
        """These hold from now on."""
        self.limit(limits)


class RemoteResponseStore:
    """Implements ResponseStore. An actor that does not answer in time cannot be reached."""

    def __init__(self, actor: ActorHandle, timeout_s: float = _TIMEOUT_S) -> None:
        self._actor = actor
        self._timeout_s = timeout_s

    async def limit(self, limits: StoreLimits) -> None:
        """Of a store that an earlier deployment has made, too."""
        await self._wait_for(self._actor.limit_to.remote(limits))

    async def begin(self, response: BegunResponse) -> None:
        await self._wait_for(self._actor.begin.remote(response))

    async def end(self, response: EndedResponse) -> bool:
        return await self._wait_for(self._actor.end.remote(response))

    async def get(self, name: ResponseName) -> StoredResponse | None:
        return await self._wait_for(self._actor.get.remote(name))

    async def conversation(self, name: ResponseName, max_bytes: int) -> list[bytes] | None:
        return await self._wait_for(self._actor.conversation.remote(name, max_bytes))

    async def delete(self, name: ResponseName) -> bool:
        return await self._wait_for(self._actor.delete.remote(name))

    async def cancel(self, name: ResponseName, timeout_s: float) -> StoredResponse | None:
        return await self._wait_for(self._actor.cancel.remote(name, timeout_s), timeout_s)

    async def cancellations(self, runner: str, timeout_s: float) -> list[ResponseName]:
        return await self._wait_for(self._actor.cancellations.remote(runner, timeout_s), timeout_s)

    async def _wait_for(self, answer: Awaitable[T], more_s: float = 0.0) -> T:
        try:
            return await asyncio.wait_for(answer, self._timeout_s + more_s)
        except (TimeoutError, ray.exceptions.RayError) as error:
            message = "stored responses cannot be reached now"
            raise ApiError(ApiErrorCode.UNAVAILABLE, message) from error


def get_response_store(app_name: str, limits: StoreLimits) -> RemoteResponseStore:
    """The application's store, created by whoever asks first."""
    options = {**on_the_head(), "max_concurrency": _MAX_CALLS}
    return RemoteResponseStore(
        get_or_create(ResponseStoreActor, store_name(app_name), options, limits)
    )
