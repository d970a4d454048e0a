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

MAX_HELD_REQUESTS = 64
"""How many requests that wait for a prefix a step looks past."""


class AdmissionResult(Enum):
    """ADMITTED: it has a slot. HELD: others may go first, it waits for a prefix that is being
    computed. REFUSED: there is no room, so that nobody after it may be admitted either."""

    ADMITTED = auto()
    HELD = auto()
    REFUSED = auto()


class Admission:
    """Moves a waiting request into a slot when its prompt fits beside what runs.

    Nobody overtakes a request that lacks room: within a priority, first come is first served. One
    that is held is passed until the prefix that it shares is in the cache, a step or two later.
    """

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        pool: PagePool,
        forecast: OutputForecast,
        counters: Counters,
        under_way: PrefillsUnderWay | None,
        clock: Callable[[], float],
    ) -> None:
        """under_way: None where prompts share nothing."""
        self._table = table
        self._memory = memory
        self._pool = pool
        self._forecast = forecast
        self._counters = counters
        self._under_way = under_way
        self._clock = clock

    def start_step(self) -> None:
        if self._under_way is not None:
            self._under_way.drop_finished()

    def try_admit(self, draft: PlanDraft, request: Request) -> AdmissionResult:
        match = self._memory.match_and_lock(request)
        num_cached = len(match.pages) * self._table.page_size
        if self._under_way is not None and self._under_way.would_save(request, num_cached):
            self._memory.unlock(match)
            return AdmissionResult.HELD
        if not self._fits(request, match):
            self._memory.unlock(match)
            return AdmissionResult.REFUSED
        self._memory.open(request, match)
        if self._under_way is not None:
            self._under_way.add(request)
        draft.admit(request, self._table.cache_indices(request.slot, 0, num_cached))
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = num_cached
            self._counters.num_prompt_tokens += request.num_prompt_tokens
            self._counters.num_cached_prompt_tokens += num_cached
        return AdmissionResult.ADMITTED

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        """Pages for the whole prompt, and then room for what running requests will bring."""
        table, page_size = self._table, self._table.page_size
        num_prompt_pages = -(-request.num_tokens // page_size)
        prompt_pages = -(-table.num_prompt_tokens() // page_size)
        num_missing = int(prompt_pages.sum() - table.num_pages.sum())
        num_new = num_prompt_pages - len(match.pages)
        num_free = self._pool.num_available_pages - num_missing - num_new
        if table.num_running == 0:
            return num_free >= 0
        own = np.int32(request.max_total_len - request.num_tokens)
        new_tokens = self._forecast.new_tokens(np.append(table.max_new_tokens(), own))
        num_tokens = np.append(table.num_prompt_tokens(), np.int32(request.num_tokens))
        given_back = np.append(prompt_pages - table.num_found_pages, np.int32(num_new))
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

    def add_rows(self, draft: PlanDraft) -> None:
        """A half-prefilled request that gets fewer pages than it wants has taken the last ones, so
        that nobody is admitted past it.
        """
        for request in tuple(self._table.prefilling):
            self._add_chunk(draft, request)
        self._admission.start_step()
        num_held = 0
        while draft.budget > 0 and self._table.has_free_slot and num_held < MAX_HELD_REQUESTS:
            waiting = self._waiting.peek(num_held)
            if waiting is None:
                return
            result = self._admission.try_admit(draft, waiting)
            if result is AdmissionResult.REFUSED:
                return
            if result is AdmissionResult.HELD:
                num_held += 1
                continue
            self._waiting.remove(waiting)
            self._add_chunk(draft, waiting)

    def _add_chunk(self, draft: PlanDraft, request: Request) -> None:
        table, slot = self._table, request.slot
        start = int(table.seq_lens[slot])
        num_wanted = min(request.prefill_len - start, draft.budget)
        num_granted = self._memory.extend(slot, num_wanted)
        if num_granted <= 0:
            return
        stop = start + num_granted
        if stop == request.prefill_len:
            table.prefilling.remove(request)
        draft.add_chunk(request, start, table.cache_indices(slot, start, stop))
