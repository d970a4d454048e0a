"""Doorkeeper: closes connections of the gRPC port that stand in others' way, as gRPC never does.

Two kinds do. Those without a call of a known caller, when connections are nearly as many as there
may be: gRPC would refuse the next one, whoever it is. And those whose clients take nothing: a call
that ended here keeps its place in gRPC until its client has read that, or is gone.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from service.security.connections import GrpcConnectionLimits
from service.security.hang_up import (
    NO_FILE_LEFT,
    Address,
    connected_to,
    hang_up,
    num_open_files,
    parse_peer,
)

PROMPT_S = 1.0
"""A client that reads learns of its call's end sooner."""
_SWEEP_S = 0.5
# A look lists the process' files and the port's connections, thousands of which take tens of
# milliseconds: at most this share of a core, but looks are no further apart than the longest pause.
_MAX_CORE_SHARE = 0.02
_MAX_PAUSE_S = 5.0
# Of max_connections: from where on connections are closed, and how many may stay then.
_HIGH, _LOW = 0.75, 0.5
# Of the places of side streams, so many may be held by calls that have ended.
_LATE_SHARE = 4
_log = logging.getLogger(__name__)


class Doorkeeper:
    """Use from one event loop. port: of the server; nobody is closed before it is known."""

    def __init__(self, limits: GrpcConnectionLimits) -> None:
        self.port: int | None = None
        self._max_connections = limits.max_connections
        self._max_late_ends = limits.max_side_streams // _LATE_SHARE
        self._busy: Counter[Address] = Counter()
        # Whose last call of a known caller has ended, the longest ago first.
        self._known: OrderedDict[Address, None] = OrderedDict()
        # Who was connected at the last look, the first seen first.
        self._seen: dict[Address, None] = {}
        # Of calls, and when each began.
        self._ends: dict[asyncio.Task[None], tuple[Address | None, float]] = {}

    @contextmanager
    def serving(self, peer: str) -> Iterator[None]:
        """A known caller's call is under way on that connection."""
        address = parse_peer(peer)
        if address is None:
            yield
            return
        self._busy[address] += 1
        try:
            yield
        finally:
            self._busy[address] -= 1
            if not self._busy[address]:
                del self._busy[address]
                self._remember(address)

    async def end(self, peer: str, ending: Coroutine[Any, Any, None]) -> None:
        """Let `ending`, which tells a call's client of its end, run for as long as it needs.

        Raises what it raises if that is soon; else CancelledError, and the call counts among those
        whose clients take nothing.
        """
        task = asyncio.create_task(ending)
        self._ends[task] = (parse_peer(peer), time.monotonic())
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait({task}, timeout=PROMPT_S)
        if not done:
            raise asyncio.CancelledError
        task.result()

    async def run(self) -> None:
        """Until cancelled, also while no file can be opened, which a look takes."""
        pause_s = _SWEEP_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                await self.sweep()
            except OSError as error:
                if error.errno not in NO_FILE_LEFT:
                    raise
                _log.warning("connections of the gRPC port cannot be looked at: %s", error)
            pause_s = pause_after(time.monotonic() - began_s)

    async def sweep(self) -> None:
        """One look at all connections, if there may be something to do."""
        if self.port is None:
            return
        chosen = self._who_take_nothing()
        if await asyncio.to_thread(num_open_files) >= _HIGH * self._max_connections:
            chosen |= self._who_ask_nothing(await asyncio.to_thread(connected_to, self.port))
        else:
            self._seen.clear()
        if chosen:
            num_left = await asyncio.to_thread(hang_up, self.port, chosen)
            if num_left:
                _log.warning(
                    "%d connections of the gRPC port cannot be closed before the next look:"
                    " no file is left",
                    num_left,
                )

    def _remember(self, address: Address) -> None:
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > self._max_connections:
            self._known.popitem(last=False)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self._ends[task]
        # Aborts always raise, and so does whatever meets a connection that has gone.
        if not (task.cancelled() or isinstance(task.exception(), grpc.aio.BaseError)):
            task.result()

    def _who_take_nothing(self) -> set[Address]:
        """Connections with the most late ends, until half as many as there may be are left."""
        late_s = time.monotonic() - PROMPT_S
        late = [address for address, began_s in self._ends.values() if began_s <= late_s]
        chosen: set[Address] = set()
        num_late = len(late)
        if num_late <= self._max_late_ends:
            return chosen
        for address, count in Counter(late).most_common():
            if num_late <= self._max_late_ends / 2:
                break
            if address is not None:
                chosen.add(address)
                num_late -= count
        return chosen

    def _who_ask_nothing(self, connected: set[Address]) -> set[Address]:
        """Those that have never had a call of a known caller first, then those idle for longest;
        none that has one, and none that has only just come."""
        old = [address for address in self._seen if address in connected]
        self._seen = dict.fromkeys((*old, *(connected - self._seen.keys())))
        if len(connected) < _HIGH * self._max_connections:
            return set()
        strangers = [address for address in old if address not in self._known]
        idle = [address for address in self._known if address in connected]
        candidates = [one for one in (*strangers, *idle) if one not in self._busy]
        return set(candidates[: round(len(connected) - _LOW * self._max_connections)])


def pause_after(look_s: float) -> float:
    """Seconds between a look that took look_s and the next one."""
    return min(max(_SWEEP_S, look_s / _MAX_CORE_SHARE), _MAX_PAUSE_S)
