"""Router: the GenerationBackend over channels to replicas.

Picks a replica per request, sends it with the others of the same event-loop tick, and retries once
elsewhere what was lost before its first output. The registry tells which replicas exist; whether
one is alive is what its own connection says. Runs on the ingress's event loop. Knows no Ray.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Protocol

from service.admission import AdmissionControl
from service.api.errors import ApiError, ApiErrorCode
from service.autoscaling.load import ModelAvailability
from service.autoscaling.waiting_room import WaitingRoom
from service.channel.address import ReplicaAddress
from service.channel.client import ReplicaLink
from service.channel.settings import ChannelSettings
from service.parking import Parking
from service.replica_chooser import ReplicaChooser
from service.request_log.record import RouteTimes
from service.routed_stream import RoutedStream
from service.routing_policy import RouterSettings, RoutingReason
from workers.protocol import GenerateRequest, ModelInfo


class RouterMetrics(Protocol):
    """What the router counts."""

    def on_routed(self, reason: RoutingReason) -> None: ...

    def on_overhead(self, seconds: float) -> None:
        """Seconds of a request, submit to last output, that were not spent at the replica."""

    def on_scale_up_wait(self, seconds: float) -> None:
        """Seconds that a request waited for its model to be scaled up from zero."""


class Router:
    """Implements GenerationBackend. start nothing in __init__: update_replicas() opens links."""

    def __init__(
        self,
        ingress_id: str,
        node_id: str,
        settings: RouterSettings,
        channel: ChannelSettings,
        admission: AdmissionControl,
        metrics: RouterMetrics,
    ) -> None:
        self._ingress_id = ingress_id
        self._node_id = node_id
        self._settings = settings
        self._channel = channel
        self._admission = admission
        self._metrics = metrics
        self._links: dict[str, ReplicaLink] = {}
        self._chooser = ReplicaChooser(settings, random.Random())
        self._streams: set[RoutedStream] = set()
        self._info: ModelInfo | None = None
        self._parking = Parking(self._reroute)
        self.demand_changed = asyncio.Event()
        self._room = WaitingRoom(
            settings.scale_up, self._route, self.demand_changed.set, metrics.on_scale_up_wait
        )

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise _unavailable()
        return self._info

    @property
    def is_ready(self) -> bool:
        """True while this ingress takes requests and some replica does, or would be started."""
        if self._admission.is_draining:
            return False
        return self._room.is_open or any(map(_is_usable, self._links.values()))

    @property
    def known_model(self) -> ModelInfo | None:
        return self._info

    @property
    def num_waiting_requests(self) -> int:
        """Requests that no replica has. demand_changed is set when the first of them comes."""
        return self._room.num_requests + self._parking.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._room.num_tokens + self._parking.num_tokens

    @property
    def is_linked(self) -> bool:
        """Whether every replica that update_replicas() has named is connected."""
        return all(link.is_connected for link in self._links.values())

    @property
    def num_connected_replicas(self) -> int:
        return sum(link.is_connected for link in self._links.values())

    def check_health(self) -> None:
        """Raise if a link has failed for a reason of our own."""
        for link in self._links.values():
            link.check_health()

    def check_admission(self) -> None:
        self._admission.check()
        try:
            self._usable_links()
        except ApiError as error:
            if not self._can_wait(error):
                raise
            self._room.check()

    async def submit(self, request: GenerateRequest) -> RoutedStream:
        self._admission.admit(len(request.prompt_token_ids))
        stream = RoutedStream(request, self, self._channel.max_stream_bytes)
        self._streams.add(stream)
        try:
            await self._place(stream)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def update_replicas(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Link to replicas not seen before; give up those that are neither listed nor connected."""
        listed = {address.replica_id for address in addresses}
        for address in addresses:
            is_new = address.replica_id not in self._links
            if is_new and address.is_reachable_from(self._node_id):
                self._links[address.replica_id] = link = ReplicaLink(
                    address, self._ingress_id, self._node_id, self._channel, self._on_change
                )
                link.start()
        for replica_id, link in list(self._links.items()):
            if replica_id not in listed and not link.is_connected:
                del self._links[replica_id]
                self._chooser.forget(replica_id)
                await link.aclose()

    def update_availability(self, told: ModelAvailability | None) -> None:
        """What the registry says of the model, None if no policy scales it."""
        if told is not None and self._info is None:
            self._info = told.model
        if told is None or told.has_failed or not told.can_wake or self._info is None:
            self._room.shut()
        else:
            self._room.open()
        if told is not None and told.has_failed:
            self._room.dismiss(_unavailable("the model could not be loaded"))

    def end_requests(self) -> int:
        """Abort every request that has not ended, with DRAINING; returns how many there were."""
        streams = list(self._streams)
        error = ApiError(ApiErrorCode.DRAINING, "the service ended before the request did")
        self._room.dismiss(error)
        for stream in streams:
            self.abort(stream)
            stream.fail(error)
        return len(streams)

    async def aclose(self) -> None:
        """Disconnect from every replica; requests under way end with REPLICA_LOST."""
        self._parking.close()
        self._room.shut()
        self._room.dismiss(_unavailable())
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.aclose()

    def resubmit(self, stream: RoutedStream, can_wait: bool) -> None:
        try:
            self._route(stream, exclude=stream.replica_id, is_retry=True)
        except ApiError:
            wait_s = self._settings.retry_wait_s
            if self._room.is_open:
                wait_s = max(wait_s, self._settings.scale_up.wait_s)
            if not (can_wait and wait_s > 0 and self._parking.is_open):
                raise
            self._parking.park(stream, wait_s)
            self.demand_changed.set()

    def abort(self, stream: RoutedStream) -> None:
        link = self._links.get(stream.replica_id)
        if link is not None:
            link.abort(stream.request.request_id)

    def on_first_output(self, stream: RoutedStream) -> None:
        self._chooser.on_first_output(stream.request.request_id)
        self._admission.start(len(stream.request.prompt_token_ids))

    def on_end(self, stream: RoutedStream, engine_s: float | None) -> None:
        self._streams.discard(stream)
        self._admission.release()
        link = self._links.get(stream.replica_id)
        written_tokens = 0 if link is None else link.load.written_tokens
        self._chooser.on_end(stream.request.request_id, written_tokens)
        if engine_s is not None:
            total_s = time.monotonic() - stream.submitted_s
            self._metrics.on_overhead(max(0.0, total_s - engine_s))

    async def _place(self, stream: RoutedStream) -> None:
        """Send the stream to a replica, now or when there is one. Raises ApiError."""
        try:
            self._route(stream)
        except ApiError as error:
            if not self._can_wait(error):
                raise
            await self._room.wait(stream)

    def _can_wait(self, error: ApiError) -> bool:
        return self._room.is_open and error.code is ApiErrorCode.UNAVAILABLE

    def _reroute(self, stream: RoutedStream) -> None:
        # Its first replica may be meant too, once the link to it stands again.
        self._route(stream, is_retry=True)

    def _route(self, stream: RoutedStream, exclude: str = "", is_retry: bool = False) -> None:
        started_s = time.monotonic()
        links = self._usable_links(exclude)
        request = stream.request
        loads = {replica_id: link.load for replica_id, link in links.items()}
        choice = self._chooser.choose(request, loads, stream.session_key)
        replica_id, reason = choice.decision
        stream.replica_id = replica_id
        links[replica_id].submit(request, stream)
        self._chooser.on_sent(request.request_id, choice)
        told_reason = RoutingReason.RETRY if is_retry else reason
        self._metrics.on_routed(told_reason)
        stream.record.routes.append(
            RouteTimes(replica_id, told_reason.value, started_s, time.monotonic())
        )

    def _usable_links(self, exclude: str = "") -> dict[str, ReplicaLink]:
        """Raises ApiError: UNAVAILABLE if no replica is there, OVERLOADED if all are full."""
        usable = {
            replica_id: link
            for replica_id, link in self._links.items()
            if replica_id != exclude and _is_usable(link)
        }
        if not usable:
            raise _unavailable()
        with_room = {i: link for i, link in usable.items() if not self._is_full(link)}
        if not with_room:
            raise ApiError(ApiErrorCode.OVERLOADED, "every replica's queue is full")
        return with_room

    def _is_full(self, link: ReplicaLink) -> bool:
        return (
            link.load.num_waiting >= self._settings.max_waiting_requests
            or link.load.queued_tokens >= self._settings.max_queued_tokens
        )

    def _on_change(self) -> None:
        if self._info is None:
            models = (link.model for link in self._links.values())
            self._info = next((model for model in models if model is not None), None)
        self._parking.on_change()
        self._room.on_change()


def _is_usable(link: ReplicaLink) -> bool:
    return link.is_connected and not link.load.is_draining and not link.load.is_stalled


def _unavailable(message: str = "no replica is ready to take the request") -> ApiError:
    return ApiError(ApiErrorCode.UNAVAILABLE, message)
