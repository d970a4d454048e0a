"""Pages that hold what encoders made of requests' inputs: an account of its own.

A request gets all pages of its input with its slot, or no slot; it gives them back when it leaves
the slot. What is known to be numbers, because a final state that attended to it is, is kept by the
content of the input while nobody needs the room: the same input, also of a request that was
retracted, is not read again. Inputs under different salts share nothing.

A page belongs to exactly one of: the free stock, a kept input, one request.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.page_allocator import PageAllocator
from workers.kv_cache.page_pool import PageCounts
from workers.kv_cache.radix_node import EMPTY, IntArray
from workers.scheduler.encoder_plan import EncoderGrant, EncoderPlan
from workers.scheduler.encoder_read import EncoderRead
from workers.scheduler.plan import StepPlan
from workers.scheduler.request import Request


@dataclass(slots=True)
class _Kept:
    """An input that was read: its pages, and how many requests use them now."""

    pages: IntArray
    num_users: int


@dataclass(slots=True)
class _Held:
    """What a running request has. is_kept: the pages are those of the kept input. num_found_tokens:
    the request's tokens that were vouched for before it saw any of this."""

    read: EncoderRead
    pages: IntArray
    is_kept: bool
    num_found_tokens: int


class EncoderMemory:
    """What the scheduler asks of the encoder's account.

    keeps_inputs: whether what one request had read may serve another one.

    Kept inputs that nobody uses go when their room is needed, those used longest ago first.
    """

    def __init__(self, num_pages: int, page_size: int, keeps_inputs: bool) -> None:
        self._allocator = PageAllocator(num_pages, page_size)
        self._page_size = page_size
        self._keeps_inputs = keeps_inputs
        # By EncoderRead.key, that used last at the end.
        self._kept: dict[str, _Kept] = {}
        self._num_evictable = 0
        self._held: dict[int, _Held] = {}
        self._grants: list[EncoderGrant] = []
        self._cleared: list[IntArray] = []

    def num_missing_tokens(self, request: Request) -> int:
        """Tokens that the encoder would have to compute for the request now."""
        read = _read_of(request)
        return 0 if read.key in self._kept else read.num_tokens

    def fits(self, request: Request) -> bool:
        """Whether there are pages for the request now."""
        read = _read_of(request)
        if read.key in self._kept:
            return True
        return self._num_pages(read) <= self._allocator.num_free_pages + self._num_evictable

    def open(self, request: Request) -> None:
        """Give the request, which fits and has just got its slot, its pages."""
        read = _read_of(request)
        kept = self._kept.get(read.key)
        if kept is None:
            pages = self._allocate(self._num_pages(read))
        else:
            pages = kept.pages
            self._use(read.key, kept)
        found = request.num_vouched_tokens
        self._held[request.slot] = _Held(read, pages, kept is not None, found)
        source = read.source if kept is None else None
        self._grants.append(EncoderGrant(request.slot, read.num_tokens, pages, source))

    def vouch(self, request: Request) -> None:
        """Keep the request's input for others once it is known to be numbers."""
        held = self._held[request.slot]
        if held.is_kept or not self._keeps_inputs or held.read.key in self._kept:
            return
        if request.num_vouched_tokens > held.num_found_tokens:
            self._kept[held.read.key] = _Kept(held.pages, num_users=1)
            held.is_kept = True

    def close(self, request: Request) -> None:
        """Take the request's pages, while it still has its slot."""
        self.vouch(request)
        held = self._held.pop(request.slot)
        # A plan that has not been made yet must not write for whoever gets the slot next.
        self._grants = [grant for grant in self._grants if grant.slot != request.slot]
        if held.is_kept:
            self._leave(self._kept[held.read.key])
            return
        if request.num_vouched_tokens <= held.num_found_tokens:
            self._cleared.append(self._indices(held))
        self._allocator.free(held.pages)

    def add_to(self, plan: StepPlan) -> StepPlan:
        """The plan, with what it must carry out for the account."""
        if not self._grants and not self._cleared:
            return plan
        cleared = np.concatenate(self._cleared) if self._cleared else EMPTY
        encoder = EncoderPlan(cleared, tuple(self._grants))
        self._cleared, self._grants = [], []
        return msgspec.structs.replace(plan, encoder=encoder)

    def counts(self) -> PageCounts:
        usable = self._allocator.num_usable_pages
        num_used = usable - self._allocator.num_free_pages - self._num_evictable
        return PageCounts(usable, num_used, self._num_evictable)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless every page has one owner and every running request its
        pages."""
        self._allocator.check_integrity()
        requests = {request.slot: request for request in running}
        if requests.keys() != self._held.keys():
            raise IntegrityError(
                f"slots {sorted(requests)} run, {sorted(self._held)} have what an encoder made"
            )
        self._check_held(requests)
        own = [held.pages for held in self._held.values() if not held.is_kept]
        kept = [one.pages for one in self._kept.values()]
        owners = np.concatenate([self._allocator.free_pages(), *kept, *own])
        counts = np.bincount(owners, minlength=self._allocator.num_pages)
        wrong = np.flatnonzero(counts != np.minimum(np.arange(len(counts)), 1))
        if len(wrong):
            raise IntegrityError(
                f"encoder pages {wrong[:8].tolist()} have {counts[wrong][:8].tolist()} owners "
                f"instead of one: {len(kept)} inputs are kept, {len(own)} requests have their own"
            )
        evictable = [len(one.pages) for one in self._kept.values() if one.num_users == 0]
        if sum(evictable) != self._num_evictable:
            raise IntegrityError(
                f"{sum(evictable)} encoder pages are evictable, {self._num_evictable} are counted"
            )

    def _check_held(self, requests: dict[int, Request]) -> None:
        users = dict.fromkeys(self._kept, 0)
        for slot, held in self._held.items():
            if held.read is not requests[slot].encoder:
                raise IntegrityError(f"slot {slot} has what another request's encoder made")
            if len(held.pages) != self._num_pages(held.read):
                raise IntegrityError(f"slot {slot} has {len(held.pages)} encoder pages")
            if held.is_kept:
                users[held.read.key] += 1
        counted = {key: kept.num_users for key, kept in self._kept.items()}
        if users != counted:
            raise IntegrityError(f"kept inputs have users {users}, {counted} are counted")

    def _allocate(self, num_pages: int) -> IntArray:
        for key in [key for key, kept in self._kept.items() if kept.num_users == 0]:
            if self._allocator.num_free_pages >= num_pages:
                break
            kept = self._kept.pop(key)
            self._num_evictable -= len(kept.pages)
            self._allocator.free(kept.pages)
        pages = self._allocator.allocate(num_pages)
        if pages is None:
            raise IntegrityError(f"{num_pages} encoder pages were counted as available")
        return pages

    def _use(self, key: str, kept: _Kept) -> None:
        if kept.num_users == 0:
            self._num_evictable -= len(kept.pages)
        kept.num_users += 1
        self._kept[key] = self._kept.pop(key)

    def _leave(self, kept: _Kept) -> None:
        kept.num_users -= 1
        if kept.num_users == 0:
            self._num_evictable += len(kept.pages)

    def _indices(self, held: _Held) -> IntArray:
        positions = np.arange(held.read.num_tokens, dtype=np.int32)
        size = np.int32(self._page_size)
        indices: IntArray = held.pages[positions // size] * size + positions % size
        return indices

    def _num_pages(self, read: EncoderRead) -> int:
        return -(-read.num_tokens // self._page_size)


def _read_of(request: Request) -> EncoderRead:
    if request.encoder is None:
        raise IntegrityError(f"request {request.request_id} has nothing for the encoder")
    return request.encoder
