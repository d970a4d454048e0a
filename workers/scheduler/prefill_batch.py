"""Prompt chunks: first of requests that are half prefilled, then of waiting ones, in order."""

from collections.abc import Callable
from enum import Enum, auto

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import PrefixMatch
from workers.scheduler.ledger import Counters
from workers.scheduler.output_forecast import OutputForecast, peak_growth_pages
from workers.scheduler.plan_draft import PlanDraft
from workers.scheduler.prefills_under_way import PrefillsUnderWay
from workers.scheduler.request import Request
from workers.scheduler.request_memory import RequestMemory
from workers.scheduler.running_table import RunningTable
from workers.scheduler.waiting_queue import WaitingQueue

MAX_PARKED_A_STEP = 256
"""How many requests a step parks before it leaves the rest to the next one: each costs the host a
look into the cache, and a step must not take long to plan."""


class AdmissionResult(Enum):
    """ADMITTED: it has a slot. PARKED: it waits for a prefix that is being computed, or for room
    for its adapter, in nobody's way. REFUSED: there is no room, so that nobody after it may be
    admitted either."""

    ADMITTED = auto()
    PARKED = auto()
    REFUSED = auto()


class Admission:
    """Moves a waiting request into a slot when its prompt fits beside what runs.

    Nobody overtakes a request that lacks room: within a priority, first come is first served. One
    that shares a prefix under way is parked until that one is in the cache.
    """

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        waiting: WaitingQueue,
        pool: PagePool,
        forecast: OutputForecast,
        counters: Counters,
        under_way: PrefillsUnderWay | None,
        clock: Callable[[], float],
    ) -> None:
        """under_way: None where prompts share nothing."""
        self._table = table
        self._memory = memory
        self._waiting = waiting
        self._pool = pool
        self._forecast = forecast
        self._counters = counters
        self._under_way = under_way
        self._clock = clock

    def start_step(self) -> None:
        """Those whose prefix is no longer under way, or whose adapter may have room, are in the
        queue again."""
        if self._under_way is not None:
            for request in self._under_way.drop_finished():
                self._waiting.release_parked(request)
        for adapters in self._memory.adapters:
            if adapters.take_free():
                self._waiting.release_parked(adapters)

    def look_ahead(self) -> None:
        """The step has no room for the queue's first: what it shares with a prompt under way is
        found out before that one is past it."""
        request = self._waiting.peek()
        if request is not None and self._under_way is not None:
            self._under_way.look_ahead(request)

    def try_admit(self, draft: PlanDraft, request: Request) -> AdmissionResult:
        """request: the queue's first. It has left the order unless it is REFUSED."""
        for adapters in self._memory.adapters:
            if adapters.must_wait(request):
                self._waiting.park(request, until=adapters)
                return AdmissionResult.PARKED
        match = self._memory.match_and_lock(request)
        num_cached = len(match.pages) * self._table.page_size
        num_encoder = self._memory.num_encoder_tokens(request)
        other = None
        if self._under_way is not None:
            other = self._under_way.find(request, num_cached, num_encoder)
        if other is not None:
            self._memory.unlock(match)
            self._waiting.park(request, until=other)
            return AdmissionResult.PARKED
        has_pages = self._fits(request, match) and self._memory.fits_others(request, match)
        if not (has_pages and draft.can_encode(num_encoder)):
            self._memory.unlock(match)
            return AdmissionResult.REFUSED
        self._waiting.remove(request)
        self._memory.open(request, match)
        if self._under_way is not None:
            self._under_way.add(request)
        draft.admit(request, match.node)
        draft.add_encoder(num_encoder)
        if request.first_scheduled_s is None:
            self._memory.count_return(match)
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = num_cached
            self._counters.num_prompt_tokens += request.num_tokens
            self._counters.num_cached_prompt_tokens += num_cached
        return AdmissionResult.ADMITTED

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        """Pages for the whole prompt, and then room for what running requests will bring."""
        table, page_size = self._table, self._table.page_size
        num_prompt_pages = -(-request.num_tokens // page_size)
        prompt_pages = -(-table.num_prompt_tokens() // page_size)
        num_missing = int(np.maximum(prompt_pages - table.pages.num_pages, 0).sum())
        num_new = num_prompt_pages - len(match.pages)
        num_free = self._pool.num_available_main - num_missing - num_new
        if table.num_running == 0:
            return num_free >= 0
        own = np.int32(request.max_total_len - request.num_tokens)
        new_tokens = self._forecast.new_tokens(np.append(table.max_new_tokens(), own))
        num_tokens = np.append(table.num_prompt_tokens(), np.int32(request.num_tokens))
        given_back = np.append(prompt_pages - table.pages.num_found, np.int32(num_new))
        return num_free >= peak_growth_pages(num_tokens, new_tokens, given_back, page_size)


class PrefillBatcher:
    """Adds prompt chunks to a draft within its budget."""

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        waiting: WaitingQueue,
        admission: Admission,
    ) -> None:
        self._table = table
        self._memory = memory
        self._waiting = waiting
        self._admission = admission

    @property
    def is_wanted(self) -> bool:
        """Whether a request is half prefilled or waits."""
        return bool(self._table.prefilling) or len(self._waiting) > 0

    @property
    def num_tokens(self) -> int:
        """Tokens that half-prefilled and waiting requests want computed, cached ones included."""
        return self._table.num_prefill_tokens + self._waiting.num_tokens

    def add_rows(self, draft: PlanDraft) -> None:
        """A half-prefilled request that gets fewer tokens than it wants has taken the last pages or
        the rest of the step, so that nobody is admitted past it.
        """
        self._admission.start_step()
        for request in tuple(self._table.prefilling):
            if not self._add_chunk(draft, request):
                self._admission.look_ahead()
                return
        num_parked = 0
        while draft.can_admit and self._table.has_free_slot and num_parked < MAX_PARKED_A_STEP:
            waiting = self._waiting.peek()
            if waiting is None:
                return
            result = self._admission.try_admit(draft, waiting)
            if result is AdmissionResult.REFUSED:
                return
            if result is AdmissionResult.PARKED:
                num_parked += 1
                continue
            if not self._add_chunk(draft, waiting):
                self._admission.look_ahead()
                return

    def _add_chunk(self, draft: PlanDraft, request: Request) -> bool:
        """Whether the request's prefill ends with this step."""
        table, slot = self._table, request.slot
        start = int(table.seq_lens[slot])
        num_wanted = min(request.prefill_len - start, draft.room_for(start))
        for media in self._memory.media:
            num_wanted = media.reach(request, start, num_wanted)
        num_granted = self._memory.extend(slot, num_wanted)
        if num_granted <= 0:
            return False
        stop = start + num_granted
        is_last = stop == request.prefill_len
        if is_last:
            table.prefilling.remove(request)
        for states in self._memory.states:
            states.plan_chunk(request, start, stop)
        for media in self._memory.media:
            draft.add_media(media.take(request, start, stop))
        draft.add_chunk(request, start, table.pages.cache_indices(slot, start, stop))
        return is_last
