"""ResponseShelf: responses in memory, bounded in number, bytes and age. Knows no Ray, no protocol.

Who has most gives way: where there is no room, the oldest response goes of the tenant that has most
of what there is too much of. So nobody drives out what others keep by storing more than they do.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from service.response_store.records import (
    BegunResponse,
    EndedResponse,
    ResponseName,
    State,
    StoredResponse,
    StoreLimits,
)
from service.response_store.turns import Turn, add_turn, conversation, release

ENTRY_BYTES = 512
"""What a response costs besides its JSON, roughly."""
RUNNER_LOST_AFTER_S = 15.0
_EMPTY = b"[]"


@dataclass(slots=True, eq=False)
class _Entry:
    """turn: None until it has ended. is_told: whether its runner has heard that it is cancelled."""

    name: ResponseName
    model: str
    head: bytes
    runner: str
    kept_s: float
    turn: Turn | None = None
    is_cancelled: bool = False
    is_told: bool = False

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.head)


class _Tenant:
    """One tenant's responses, the oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0


class ResponseShelf:
    """Single-threaded. clock: seconds, never goes back."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        # Every response there is, the oldest first.
        self._entries: OrderedDict[ResponseName, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._runners: dict[str, float] = {}

    @property
    def num_responses(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def begin(self, response: BegunResponse) -> None:
        """A response is under way; nothing if it is too large to be kept."""
        if len(response.head) > self.limits.max_response_bytes:
            return
        self._runners.setdefault(response.runner, self._clock())
        entry = _Entry(response.name, response.model, response.head, response.runner, self._clock())
        self._put(entry)

    def end(self, response: EndedResponse) -> bool:
        """Keep a response, in the place of what began it. False if it cannot be: it is too large,
        or what it follows is gone."""
        begun = self._entries.get(response.name)
        previous = None
        if response.previous_id:
            found = self._find(ResponseName(response.name.tenant, response.previous_id))
            previous = None if found is None else found.turn
        is_cut = bool(response.previous_id) and previous is None
        if is_cut or response.num_bytes > self.limits.max_response_bytes:
            if begun is not None:
                self._drop(begun)
            return False
        turn = add_turn(previous, response.input, response.output)
        if begun is not None:
            self._drop(begun)
        entry = _Entry(response.name, response.model, response.head, "", self._clock(), turn)
        self._put(entry)
        return response.name in self._entries

    def get(self, name: ResponseName) -> StoredResponse | None:
        entry = self._find(name)
        if entry is None:
            return None
        turn = entry.turn
        if turn is None:
            return StoredResponse(self._state(entry), entry.model, entry.head, _EMPTY, _EMPTY)
        return StoredResponse(State.ENDED, entry.model, entry.head, turn.input, turn.output)

    def conversation(self, name: ResponseName, max_bytes: int) -> list[bytes] | None:
        """Of a response that has ended and what it follows; see turns.conversation()."""
        entry = self._find(name)
        if entry is None or entry.turn is None:
            return None
        return conversation(entry.turn, max_bytes)

    def delete(self, name: ResponseName) -> bool:
        """Whether it was there. Responses that follow it keep what they need."""
        entry = self._find(name)
        if entry is None:
            return False
        self._drop(entry)
        return True

    def cancel(self, name: ResponseName) -> bool:
        """Have its runner told to stop; False if there is no such response under way."""
        entry = self._find(name)
        if entry is None or self._state(entry) in (State.ENDED, State.LOST):
            return False
        entry.is_cancelled, entry.is_told = True, False
        return True

    def hear(self, runner: str) -> None:
        """The runner is there."""
        now_s = self._clock()
        heard_s = {**self._runners, runner: now_s}
        self._runners = {r: s for r, s in heard_s.items() if s >= now_s - RUNNER_LOST_AFTER_S}

    def cancelled_of(self, runner: str) -> list[ResponseName]:
        """Those of the runner that have to stop, each told once."""
        told = [
            entry
            for entry in self._entries.values()
            if entry.is_cancelled and not entry.is_told and entry.runner == runner
        ]
        for entry in told:
            entry.is_told = True
        return [entry.name for entry in told]

    def _state(self, entry: _Entry) -> State:
        if entry.turn is not None:
            return State.ENDED
        heard_s = self._runners.get(entry.runner)
        if heard_s is None or heard_s < self._clock() - RUNNER_LOST_AFTER_S:
            return State.LOST
        return State.CANCELLING if entry.is_cancelled else State.RUNNING

    def _find(self, name: ResponseName) -> _Entry | None:
        self._expire()
        return self._entries.get(name)

    def _put(self, entry: _Entry) -> None:
        tenant = self._tenants.setdefault(entry.name.tenant, _Tenant())
        num_bytes = entry.num_bytes + (0 if entry.turn is None else entry.turn.num_bytes)
        tenant.entries[entry.name.response_id] = entry
        self._entries[entry.name] = entry
        self._count(tenant, num_bytes)
        self._expire()
        while len(self._entries) > self.limits.max_responses:
            self._drop_oldest(lambda tenant: len(tenant.entries))
        while self._num_bytes > self.limits.max_total_bytes:
            self._drop_oldest(lambda tenant: tenant.num_bytes)

    def _drop_oldest(self, size_of: Callable[[_Tenant], int]) -> None:
        largest = max(self._tenants.values(), key=size_of)
        self._drop(next(iter(largest.entries.values())))

    def _expire(self) -> None:
        oldest_s = self._clock() - self.limits.ttl_s
        while self._entries:
            entry = next(iter(self._entries.values()))
            if entry.kept_s >= oldest_s:
                return
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        tenant = self._tenants[entry.name.tenant]
        del tenant.entries[entry.name.response_id]
        del self._entries[entry.name]
        num_bytes = entry.num_bytes + (0 if entry.turn is None else release(entry.turn))
        self._count(tenant, -num_bytes)
        if not tenant.entries:
            del self._tenants[entry.name.tenant]

    def _count(self, tenant: _Tenant, num_bytes: int) -> None:
        tenant.num_bytes += num_bytes
        self._num_bytes += num_bytes
