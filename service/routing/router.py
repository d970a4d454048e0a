"""Router: the GenerationBackend over channels to replicas.

Picks a replica per request, sends it with the others of the same event-loop tick, and moves it with
its output to another one when its own is lost, refuses it or drains. The registry tells which
replicas exist; whether one is alive is what its own connection says. Runs on the ingress's event
loop. Knows no Ray.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from service.autoscaling.load import ModelAvailability
from service.channel.address import ReplicaAddress
from service.channel.client import ReplicaLink
from service.channel.settings import ChannelSettings
from service.errors import ApiError, ApiErrorCode
from service.observability.request_log.record import RouteTimes
from service.request_context import RequestContext
from service.routing.admission import AdmissionControl
from service.routing.handover import Handover, share_of_waiting
from service.routing.metrics import RouterMetrics
from service.routing.policy import MOVES, RouterSettings, RoutingReason
from service.routing.replica_chooser import ReplicaChooser
from service.routing.replica_links import emptiest, is_usable, is_well
from service.routing.resumption import retry_delay_s, with_seed
from service.routing.routed_stream import RoutedStream
from service.routing.sleep import asleep, is_asleep
from service.routing.suspects import Suspects
from service.routing.waiting_room import WaitingRoom
from workers.engine.protocol import GenerateRequest, ModelInfo

_TURN_SHARE = 0.5
"""Of move_wait_s, for which a suspect waits for its turn; then it goes with the others. It comes on
top of what the suspect waited for a replica to be there."""


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
        self._ledger = admission.ledger
        self._chooser = ReplicaChooser(settings, self._ledger, random.Random())
        self._streams: set[RoutedStream] = set()
        self._info: ModelInfo | None = None
        self._can_wake = False
        self.demand_changed = asyncio.Event()
        self._room = WaitingRoom(
            settings.scale_up, self._send_again, self.demand_changed.set, metrics.on_scale_up_wait
        )
        self._handover = Handover(settings.max_handovers, self._hand_over)
        self._suspects = Suspects(settings.max_losses, _TURN_SHARE * settings.move_wait_s)
        self._known_usable: set[str] = set()

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
        return self._can_wake or any(map(is_well, self._links.values()))

    @property
    def known_model(self) -> ModelInfo | None:
        return self._info

    @property
    def num_waiting_requests(self) -> int:
        """Requests that no replica has. demand_changed is set when the first of them comes."""
        return self._room.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of these requests."""
        return self._room.num_tokens

    @property
    def is_linked(self) -> bool:
        """Whether every replica that update_replicas() has named is connected."""
        return all(link.is_connected for link in self._links.values())

    @property
    def links(self) -> Mapping[str, ReplicaLink]:
        """By replica."""
        return self._links

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

    async def submit(self, request: GenerateRequest, context: RequestContext) -> RoutedStream:
        self._admission.admit(request.request_id, request.num_input_tokens)
        stream = RoutedStream(with_seed(request), context, self, self._channel.max_stream_bytes)
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
                on_change = partial(self._on_change, address.replica_id)
                self._links[address.replica_id] = link = ReplicaLink(
                    address, self._ingress_id, self._node_id, self._channel, on_change
                )
                link.start()
        for replica_id, link in list(self._links.items()):
            if replica_id not in listed and not link.is_connected:
                del self._links[replica_id]
                self._chooser.forget(replica_id)
                self._known_usable.discard(replica_id)
                await link.aclose()

    def update_availability(self, told: ModelAvailability | None) -> None:
        """What the registry says of the model, None if no policy scales it."""
        if told is not None:
            self._learn(told.model)
        is_hopeful = told is not None and told.can_wake and not told.has_failed
        self._can_wake = is_hopeful and self._info is not None
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
        """Disconnect from every replica; requests under way end with an error."""
        self._can_wake = False
        self._room.close(_unavailable())
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.aclose()

    def move(self, stream: RoutedStream, *, is_replica_lost: bool) -> None:
        self._ledger.recall(stream.id, stream.num_tokens)
        self._handover.on_arrived(stream)
        lost_id, stream.replica_id = stream.replica_id, ""
        if is_replica_lost:
            self._suspects.charge(stream)
            if self._suspects.has_lost_enough(stream):
                raise _lost()
        try:
            if self._must_wait(stream, lost_id, is_replica_lost):
                raise _unavailable()
            self._send(stream, stream.next_attempt(), stream.move_reason, exclude=lost_id)
        except ApiError as error:
            if stream.move_reason is RoutingReason.SLEEP:
                # Nobody waits for an operator.
                raise asleep() from error
            if stream.move_reason is RoutingReason.REFUSED and not stream.has_output:
                raise
            self._hold(stream, _lost() if stream.has_output else error)

    def _must_wait(self, stream: RoutedStream, exclude: str, is_replica_lost: bool) -> bool:
        """Whether it goes to the waiting room though another replica may be there. Raises ApiError
        if it does because none is."""
        num_delays = stream.num_refusals - self._settings.max_moves
        if num_delays > 0:
            stream.retry_s = time.monotonic() + retry_delay_s(num_delays)
            return True
        if is_replica_lost and self._suspects.is_suspect(stream):
            self._usable_links(exclude)
            self._suspects.begin_waiting(stream)  # behind those that wait already
            return not self._suspects.is_overdue(stream)
        return not self._suspects.may_go(stream)

    def abort(self, stream: RoutedStream) -> None:
        self._room.leave(stream)
        link = self._links.get(stream.replica_id)
        if link is not None:
            link.abort(stream.attempt.request_id)

    def on_answer(self, stream: RoutedStream) -> None:
        self._ledger.start(stream.id)
        if stream.lost_s is not None and stream.has_output:
            self._metrics.on_pause(time.monotonic() - stream.lost_s)
        if self._handover.on_arrived(stream):
            self._advance_handover()

    def on_end(self, stream: RoutedStream, engine_s: float | None) -> None:
        self._streams.discard(stream)
        self._room.leave(stream)
        self._ledger.close(stream.id)
        link = self._links.get(stream.replica_id)
        written_tokens = 0 if link is None else link.load.written_tokens
        self._chooser.on_end(stream.id, written_tokens)
        if engine_s is not None:
            total_s = time.monotonic() - stream.sent_s
            self._metrics.on_overhead(max(0.0, total_s - engine_s))
        if self._handover.on_arrived(stream):
            self._advance_handover()

    async def _place(self, stream: RoutedStream) -> None:
        """Send the stream to a replica, now or when there is one. Raises ApiError."""
        try:
            self._send(stream, stream.request)
        except ApiError as error:
            if not self._can_wait(error):
                raise
            await self._room.wait(stream)

    def _can_wait(self, error: ApiError) -> bool:
        return self._can_wake and error.code is ApiErrorCode.UNAVAILABLE

    def _hold(self, stream: RoutedStream, late: ApiError) -> None:
        """Keep a stream that nobody takes now. Raises `late` if it has no time left to wait."""
        wait_s = self._settings.move_wait_s
        if self._can_wake:
            wait_s = max(wait_s, self._settings.scale_up.wait_s)
        if stream.lost_s is not None:
            wait_s -= time.monotonic() - stream.lost_s
        wait_s = max(wait_s, self._suspects.turn_left_s(stream))
        if wait_s <= 0 or self._room.is_closed:
            raise late

        def on_leave(error: ApiError | None) -> None:
            turn_s = self._suspects.turn_left_s(stream)
            if error is late and turn_s > 0:  # a replica is there, only others come first
                self._room.hold(stream, turn_s, late, on_leave)
            elif error is not None:
                stream.fail(late if error.code is ApiErrorCode.UNAVAILABLE else error)

        self._room.hold(stream, wait_s, late, on_leave)
        self.demand_changed.set()

    def _send_again(self, stream: RoutedStream) -> None:
        """Out of the waiting room. The replica that it had may be meant too, once its link stands
        again."""
        if time.monotonic() < stream.retry_s or not self._suspects.may_go(stream):
            raise _unavailable()
        if stream.move_reason is None:
            self._send(stream, stream.request)
        else:
            self._send(stream, stream.next_attempt(), stream.move_reason)

    def _hand_over(self, stream: RoutedStream, reason: RoutingReason = RoutingReason.DRAIN) -> bool:
        old_link, old_id = self._links[stream.replica_id], stream.attempt.request_id
        try:
            attempt = stream.next_attempt()
            self._send(stream, attempt, reason, exclude=stream.replica_id)
        except ApiError:
            return False
        stream.pause()
        old_link.abort(old_id)
        return True

    def _advance_handover(self) -> None:
        self._handover.advance(self._leaving_streams())

    def _spread_waiting(self, new_id: str) -> None:
        """A replica has come: it takes its share of what waits at the others."""
        usable = {i: link for i, link in self._links.items() if is_usable(link)}
        for replica_id, link in usable.items():
            if replica_id == new_id:
                continue
            unanswered = (
                stream
                for stream in self._streams
                if stream.replica_id == replica_id and not stream.is_answered
            )
            for stream in share_of_waiting(unanswered, link.load.num_waiting, len(usable)):
                self._hand_over(stream, RoutingReason.SPREAD)

    def _leaving_streams(self) -> Iterator[RoutedStream]:
        leaving = {
            replica_id
            for replica_id, link in self._links.items()
            if link.is_connected and link.load.is_draining
        }
        if leaving and any(map(is_usable, self._links.values())):
            yield from (stream for stream in self._streams if stream.replica_id in leaving)

    def _send(
        self,
        stream: RoutedStream,
        attempt: GenerateRequest,
        moved: RoutingReason | None = None,
        exclude: str = "",
    ) -> None:
        """moved: why, None for a stream's first replica. Raises ApiError if none takes it."""
        started_s = time.monotonic()
        links = self._usable_links(exclude)
        if self._suspects.is_suspect(stream):
            links = emptiest(links)
        loads = {replica_id: link.load for replica_id, link in links.items()}
        choice = self._chooser.choose(attempt, loads, stream.session_key)
        replica_id, chosen = choice.decision
        sequence = links[replica_id].submit(attempt, stream)
        self._suspects.on_sent(stream)
        stream.on_sent(attempt, replica_id)
        self._ledger.send(
            stream.id, replica_id, stream.num_tokens, choice.uncached_tokens, sequence
        )
        self._chooser.on_sent(stream.id, choice)
        reason = moved or chosen
        self._metrics.on_routed(reason)
        stream.context.record.add_route(
            RouteTimes(replica_id, reason.value, started_s, time.monotonic(), reason in MOVES)
        )

    def _usable_links(self, exclude: str = "") -> dict[str, ReplicaLink]:
        """Raises ApiError: UNAVAILABLE if no replica is there, OVERLOADED if all are full."""
        usable = {
            replica_id: link
            for replica_id, link in self._links.items()
            if replica_id != exclude and is_usable(link)
        }
        if not usable:
            raise asleep() if any(map(is_asleep, self._links.values())) else _unavailable()
        with_room = {i: link for i, link in usable.items() if not self._is_full(link)}
        if not with_room:
            raise ApiError(ApiErrorCode.OVERLOADED, "every replica's queue is full")
        return with_room

    def _is_full(self, link: ReplicaLink) -> bool:
        queue = self._ledger.at(link.replica_id)
        return (
            link.load.num_waiting + queue.num_unseen >= self._settings.max_waiting_requests
            or link.load.queued_tokens + queue.unseen_tokens >= self._settings.max_queued_tokens
        )

    def _learn(self, model: ModelInfo | None) -> None:
        """What the model is, is said once: it is the same at every replica."""
        if self._info is not None or model is None:
            return
        self._info = model
        if not model.has_prefix_cache:
            self._chooser.ignore_prefixes()

    def _on_change(self, replica_id: str) -> None:
        link = self._links.get(replica_id)
        if link is None:  # given up
            return
        if not link.is_connected:
            self._suspects.on_disconnect(replica_id)
        self._ledger.on_report(replica_id, link.load.seen_sequence)
        self._learn(link.model)
        self._room.on_change()
        if replica_id not in self._known_usable and is_usable(link):
            self._known_usable.add(replica_id)
            self._spread_waiting(replica_id)
        self._advance_handover()


def _lost() -> ApiError:
    message = "the replica that served this request was lost and no other one goes on with it"
    return ApiError(ApiErrorCode.REPLICA_LOST, message)


def _unavailable(message: str = "no replica is ready to take the request") -> ApiError:
    return ApiError(ApiErrorCode.UNAVAILABLE, message)
