"""Sleep and wake of one model, as an ingress orders it of all replicas that it is linked to."""

import asyncio
import time
from collections.abc import Callable, Mapping

from service.channel.client import ReplicaLink
from service.errors import ApiError, ApiErrorCode
from workers.engine.rest import SleepOrder

_POLL_S = 0.02
MAX_WAIT_S = 900.0
"""For requests that run to end, or for weights that are read anew."""


def is_asleep(link: ReplicaLink) -> bool:
    return link.is_connected and link.load.sleep_level > 0


def asleep() -> ApiError:
    """What requests are told."""
    return ApiError(ApiErrorCode.MODEL_SLEEPING, "the model sleeps until an operator wakes it")


class SleepControl:
    """links: the replicas that there are now."""

    def __init__(self, model: str, links: Callable[[], Mapping[str, ReplicaLink]]) -> None:
        self.model = model
        self._links = links
        self._num_orders = 0

    @property
    def is_sleeping(self) -> bool:
        """Whether every replica is. Raises ApiError where there is none."""
        return all(map(is_asleep, self._connected().values()))

    async def sleep(self, level: int, *, aborts: bool) -> None:
        """Returns when every replica sleeps. Raises ApiError, before anything is done where one
        cannot."""
        await self._order(SleepOrder(level, aborts))

    async def wake_up(self) -> None:
        """Returns when every replica takes requests. Raises ApiError."""
        await self._order(SleepOrder(0, aborts=False))

    async def _order(self, order: SleepOrder) -> None:
        links = self._connected()
        for link in links.values():
            obstacle = "it is not known yet" if link.model is None else link.model.sleep_obstacle
            if obstacle:
                message = f"the model {self.model!r} cannot sleep: {obstacle}"
                raise ApiError(ApiErrorCode.INVALID_REQUEST, message)
        for link in links.values():
            link.set_sleep(order)
        self._num_orders += 1
        await self._settled(links, order, self._num_orders)

    async def _settled(self, links: Mapping[str, ReplicaLink], order: SleepOrder, own: int) -> None:
        end_s = time.monotonic() + MAX_WAIT_S
        while True:
            await asyncio.sleep(_POLL_S)
            if not all(link.is_connected for link in links.values()):
                raise ApiError(ApiErrorCode.REPLICA_LOST, "a replica was lost meanwhile")
            if all(_has_done(link, order) for link in links.values()):
                return
            if own != self._num_orders:
                raise ApiError(ApiErrorCode.INVALID_REQUEST, "a later call took this one's place")
            if time.monotonic() > end_s:
                raise ApiError(ApiErrorCode.TIMEOUT, f"not done within {MAX_WAIT_S:g} s")

    def _connected(self) -> Mapping[str, ReplicaLink]:
        links = {name: link for name, link in self._links().items() if link.is_connected}
        if not links:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the model has no replica now")
        return links


def _has_done(link: ReplicaLink, order: SleepOrder) -> bool:
    level = link.load.sleep_level
    return level >= order.level if order.level else level == 0
