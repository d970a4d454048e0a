"""Which states a step saves, from which requests go on, and who has the places for them.

A place for a snapshot belongs to exactly one of: the free stock, a node of the prefix cache, one
request. A request takes places of two kinds. Lasting ones are for others to come upon: near the end
of its prompt, and where prompts have been seen to part. They go to the cache with the pages of the
prompt. A rolling one moves on with the request, through a long prompt and through the
output; it goes to the cache when the request leaves its slot. What a step saves counts once the
step is committed; until then what was saved before is kept.

A step under way may still read or write a place that has a new owner: steps run in order, and what
the new owner has saved there comes later.
"""

from bisect import insort
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.prefix_cache import PrefixMatch
from workers.kv_cache.radix_node import NO_SNAPSHOT, IntArray, RadixNode
from workers.kv_cache.snapshot_cache import SnapshotRadixCache
from workers.scheduler.plan import StepPlan
from workers.scheduler.request import Request
from workers.scheduler.running_table import RunningTable
from workers.scheduler.slot_pages import SlotArray
from workers.scheduler.state_moves import StateRestores, StateSaves

BORDER_TOKENS = 64
"""Snapshots stand behind multiples of so many tokens, in whole pages. Chunked recurrences compute
about as many tokens at a time: a row that is cut there costs them nothing, nor would going on from
a later token save anything."""
PROMPT_ROLL_TOKENS = 1024
"""How far rolling snapshots of a prompt are apart: chunks of it do not end at such a border."""
MAX_LASTING = 6
"""Of one prompt: its own two, and what others ask for while it is computed."""


class _Save(NamedTuple):
    """The states that request has in slot after its first position tokens."""

    request: Request
    slot: int
    position: int
    snapshot: int
    is_lasting: bool


class _SlotStates:
    """Of one running request.

    wanted: where lasting saves are to come, ascending. lasting: where they have been planned. kept:
    what committed steps have saved and the cache has not got. last_saved: the highest position of
    any, or where the request began. is_rolling: whether it counts among those with a rolling one.
    """

    __slots__ = ("is_rolling", "kept", "last_saved", "lasting", "wanted")

    def __init__(self, wanted: list[int], start: int) -> None:
        self.wanted = wanted
        self.lasting: list[int] = []
        self.kept: list[_Save] = []
        self.last_saved = start
        self.is_rolling = False


class SnapshotMemory:
    """What the scheduler asks of a model's states, where the prefix cache keeps prefixes of it."""

    def __init__(self, table: RunningTable, cache: SnapshotRadixCache) -> None:
        self._table = table
        self._cache = cache
        self._page_size = table.page_size
        self._border_tokens = -(-BORDER_TOKENS // table.page_size) * table.page_size
        # Those that run must not take all from those that are to come.
        self._max_rolling = cache.num_snapshots // 2
        self._num_rolling = 0
        self._slots: dict[int, _SlotStates] = {}
        # Of the step that is being planned: by slot where its chunk begins; slots and snapshots.
        self._chunk_starts: dict[int, int] = {}
        self._restores: list[tuple[int, int]] = []
        self._saves: list[_Save] = []
        self._uncommitted: deque[tuple[int, list[_Save]]] = deque()

    def open(self, request: Request, match: PrefixMatch) -> None:
        """The request has got its slot and begins with match."""
        start = len(match.pages) * self._page_size
        if start:
            if match.snapshot == NO_SNAPSHOT:
                raise IntegrityError(f"a prefix of {start} tokens was matched without its states")
            self._restores.append((request.slot, match.snapshot))
        branch = self._last_border(match.num_known_pages * self._page_size)
        # The last token of a prompt is computed, whatever is cached.
        end_of_prompt = self._last_border(request.prefill_len - 1)
        wanted = sorted(one for one in {branch, end_of_prompt} if one > start)
        self._slots[request.slot] = _SlotStates(wanted, start)

    def plan_chunk(self, request: Request, start: int, stop: int) -> None:
        """The step computes tokens start .. stop - 1 of the request's prompt."""
        own = self._slots[request.slot]
        self._chunk_starts[request.slot] = start
        while own.wanted and own.wanted[0] <= stop:
            self._save_lasting(request, own.wanted.pop(0))
        end = self._last_border(stop)
        is_last = stop == request.prefill_len
        if not is_last and end > start and end - own.last_saved >= PROMPT_ROLL_TOKENS:
            self._roll(request, end)

    def plan_decode(self, slots: SlotArray) -> None:
        """The step computes one token of each of slots; seq_lens counts it."""
        at_border = slots[self._table.seq_lens[slots] % self._border_tokens == 0]
        for request in self._table.requests_at(at_border):
            self._roll(request, int(self._table.seq_lens[request.slot]))

    def resume_length(self, request: Request, num_tokens: int) -> int:
        """Of the first num_tokens tokens, whole pages, of a prompt that is being computed: after
        how many another request will be able to go on, once it is."""
        own = self._slots[request.slot]
        known, border = own.wanted + own.lasting, self._last_border(num_tokens)
        if border in known:
            return border
        if len(known) < MAX_LASTING and self._want(request, border):
            return border
        return max((position for position in known if position < border), default=0)

    def add_to(self, plan: StepPlan) -> StepPlan:
        """The plan, with all that has been planned since the last one."""
        self._chunk_starts.clear()
        if self._restores:
            slots, snapshots = zip(*self._restores, strict=True)
            restores = StateRestores(_int32(slots), _int32(snapshots))
            plan = msgspec.structs.replace(plan, state_restores=restores)
            self._restores.clear()
        if self._saves:
            _, slots, positions, snapshots, _ = zip(*self._saves, strict=True)
            saves = StateSaves(_int32(slots), _int32(positions), _int32(snapshots))
            plan = msgspec.structs.replace(plan, state_saves=saves)
            self._uncommitted.append((plan.step_id, self._saves))
            self._saves = []
        return plan

    def settle(self, step_id: int) -> None:
        """The oldest step that is not committed yet has run. Before its requests end."""
        if not self._uncommitted or self._uncommitted[0][0] != step_id:
            return
        for save in self._uncommitted.popleft()[1]:
            if save.request.is_ended:
                self._cache.give_snapshot_back(save.snapshot)
                continue
            own = self._slots[save.slot]
            if not save.is_lasting:
                self._drop(own, [one for one in own.kept if not one.is_lasting])
            own.kept.append(save)

    def share(self, request: Request) -> None:
        """The prompt's pages have gone to the cache, down to the slot's node."""
        own = self._slots[request.slot]
        lasting = [one for one in own.kept if one.is_lasting]
        self._attach(own, lasting, self._table.pages.node_of(request.slot))
        highest = max(own.lasting, default=0)
        # What lies before the end of the prompt was kept in case it would not come to that.
        self._drop(own, [one for one in own.kept if one.position < highest])

    def leave(self, request: Request, node: RadixNode) -> None:
        """The request's pages have gone to the cache, down to node."""
        own = self._slots[request.slot]
        self._attach(own, own.kept, node)

    def close(self, request: Request) -> None:
        """The request leaves its slot; what it has not handed over is dropped."""
        own = self._slots.pop(request.slot)
        self._drop(own, own.kept)
        self._num_rolling -= own.is_rolling
        self._restores = [one for one in self._restores if one[0] != request.slot]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each place has exactly one owner."""
        running = sorted(request.slot for request in self._table.requests())
        if sorted(self._slots) != running:
            raise IntegrityError(f"slots {sorted(self._slots)} have states, {running} run")
        of_slots = [save for own in self._slots.values() for save in own.kept]
        of_steps = [save for _, saves in self._uncommitted for save in saves]
        self._cache.check_snapshots(save.snapshot for save in (*of_slots, *of_steps, *self._saves))
        num_rolling = sum(own.is_rolling for own in self._slots.values())
        if num_rolling != self._num_rolling or num_rolling > self._max_rolling:
            raise IntegrityError(
                f"{num_rolling} requests have rolling snapshots, {self._num_rolling} are counted "
                f"and {self._max_rolling} may"
            )

    def _last_border(self, num_tokens: int) -> int:
        return num_tokens // self._border_tokens * self._border_tokens

    def _want(self, request: Request, position: int) -> bool:
        """Whether the states there will be saved: if they are not computed, or are being planned.
        position: on a border within the prompt, and not known yet."""
        if position > int(self._table.seq_lens[request.slot]):
            insort(self._slots[request.slot].wanted, position)
            return True
        start = self._chunk_starts.get(request.slot)
        return start is not None and position > start and self._save_lasting(request, position)

    def _save_lasting(self, request: Request, position: int) -> bool:
        if not (self._make_lasting(request, position) or self._save(request, position, True)):
            return False
        self._slots[request.slot].lasting.append(position)
        return True

    def _make_lasting(self, request: Request, position: int) -> bool:
        """Whether the step saves there for the request's own use already, which then is for others
        too: a row's states are saved once behind a token."""
        for index, save in enumerate(self._saves):
            if save.request is request and save.position == position:
                self._saves[index] = save._replace(is_lasting=True)
                return True
        return False

    def _roll(self, request: Request, position: int) -> None:
        own = self._slots[request.slot]
        if not own.is_rolling:
            if self._num_rolling == self._max_rolling:
                return
            own.is_rolling = True
            self._num_rolling += 1
        self._save(request, position, False)

    def _save(self, request: Request, position: int, is_lasting: bool) -> bool:
        snapshot = self._cache.take_snapshot()
        if snapshot is None:
            return False
        self._saves.append(_Save(request, request.slot, position, snapshot, is_lasting))
        own = self._slots[request.slot]
        own.last_saved = max(own.last_saved, position)
        return True

    def _attach(self, own: _SlotStates, saves: list[_Save], node: RadixNode) -> None:
        """Hand over to the cache what lies on the path to node."""
        num_pages = node.num_path_pages()
        handed_over = [one for one in saves if one.position <= num_pages * self._page_size]
        for save in handed_over:
            self._cache.attach_snapshot(node, save.position // self._page_size, save.snapshot)
        own.kept = [one for one in own.kept if one not in handed_over]

    def _drop(self, own: _SlotStates, saves: list[_Save]) -> None:
        for save in saves:
            self._cache.give_snapshot_back(save.snapshot)
        own.kept = [one for one in own.kept if one not in saves]


def _int32(values: tuple[int, ...]) -> IntArray:
    return np.array(values, dtype=np.int32)
