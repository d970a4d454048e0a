"""The running requests by slot, as a struct of arrays: a decode step touches no request object.

A slot is the request's row of req_to_token on the device. Which pages it has is slot_pages.py.
"""

from bisect import insort

import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.prefix_cache import InsertResult, PrefixMatch
from workers.kv_cache.radix_node import IntArray
from workers.scheduler.request import NO_SLOT, Request
from workers.scheduler.slot_pages import SlotArray, SlotPages


class RunningTable:
    """Per-slot state; all zeros in a free slot.

    Every step under way counts as done, and every draft in one as right until settle says that it
    was not. Invariant of a used slot: it has ceil(seq_lens / page_size) pages, but that pages which
    were taken for drafts, or for a token that is taken back, stay: of max_tokens_in_doubt at most.

    seq_lens: tokens in the pool. max_drafts: most drafts of a run. prefill_lens: tokens to compute
    before the slot decodes.
    max_total_lens: most tokens of prompt and output. pages: which pages each slot has.
    """

    def __init__(
        self,
        max_slots: int,
        max_pages_per_request: int,
        page_size: int,
        num_bounded: int = 0,
        max_tokens_in_doubt: int = 0,
    ) -> None:
        self.page_size = page_size
        self._max_tokens_in_doubt = max_tokens_in_doubt
        self.seq_lens: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.prefill_lens: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.max_total_lens: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.max_drafts: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.pages = SlotPages(max_slots, max_pages_per_request, page_size, num_bounded)
        # Counted, so that steps without such requests need not look.
        self.num_constrained = 0
        self.prefilling: list[Request] = []
        self._requests: list[Request | None] = [None] * max_slots
        self._free_slots = list(range(max_slots - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of half-prefilled requests that are still to be computed."""
        return int(np.maximum(self.prefill_lens - self.seq_lens, 0).sum())

    def requests(self) -> list[Request]:
        return [request for request in self._requests if request is not None]

    def requests_at(self, slots: SlotArray) -> list[Request]:
        """The requests of used slots, in their order."""
        requests = self._requests
        return [requests[slot] for slot in slots.tolist()]

    def add(self, request: Request, prefix: PrefixMatch) -> None:
        """Give the request a slot that begins with a match that is locked and held."""
        slot = self._free_slots.pop()
        self._requests[slot] = request
        self.pages.begin_with_prefix(slot, prefix)
        self.seq_lens[slot] = len(prefix.pages) * self.page_size
        self.prefill_lens[slot] = request.prefill_len
        self.max_total_lens[slot] = request.max_total_len
        self.max_drafts[slot] = request.max_draft_tokens
        self.num_constrained += request.is_constrained
        request.slot = slot
        insort(self.prefilling, request, key=lambda other: other.sort_key)

    def remove(self, request: Request, result: InsertResult | None) -> tuple[IntArray, ...]:
        """Take the request's slot. Returns as SlotPages.release, result being what became of the
        offer to the cache, if there was one."""
        slot = request.slot
        if slot == NO_SLOT or self._requests[slot] is not request:
            raise IntegrityError(f"request {request.request_id} does not hold slot {slot}")
        if self.seq_lens[slot] < self.prefill_lens[slot]:
            self.prefilling.remove(request)
        self._requests[slot] = None
        self.num_constrained -= request.is_constrained
        for array in self._per_slot():
            array[slot] = 0
        self._free_slots.append(slot)
        request.slot = NO_SLOT
        return self.pages.release(slot, result)

    def decode_slots(self) -> SlotArray:
        """Slots whose next token is wanted: prefilled, and not yet at their limit."""
        seq_lens = self.seq_lens
        return np.flatnonzero(
            (seq_lens >= self.prefill_lens) & (seq_lens + 1 < self.max_total_lens)
        )

    def num_prompt_tokens(self) -> IntArray:
        """Tokens that each slot holds once it is prefilled, int32: it has them, or wants them."""
        num_tokens: IntArray = np.maximum(self.seq_lens, self.prefill_lens)
        return num_tokens

    def max_new_tokens(self) -> IntArray:
        """Tokens that each slot may still bring into the pool beyond those, int32."""
        num_left: IntArray = self.max_total_lens - 1 - self.num_prompt_tokens()
        return np.maximum(num_left, 0)

    def settle(self, slot: int, num_wrong: int) -> None:
        """So many drafts of the slot's oldest run under way were wrong."""
        self.seq_lens[slot] -= num_wrong

    def take_back(self, slot: int) -> None:
        """The slot's newest token will be brought into the pool again, where it stands."""
        self.seq_lens[slot] -= 1

    def written_len(self, slot: int) -> int:
        """Tokens that the slot's pages may hold anything of, those of wrong drafts included."""
        most = int(self.seq_lens[slot]) + self._max_tokens_in_doubt
        return min(most, int(self.pages.num_pages[slot]) * self.page_size)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, requests and lengths tell the same."""
        used = [slot for slot, request in enumerate(self._requests) if request is not None]
        if sorted(used + self._free_slots) != list(range(len(self._requests))):
            raise IntegrityError(f"{len(used)} slots used, {len(self._free_slots)} free, no match")
        for slot in self._free_slots:
            if any(array[slot] for array in self._per_slot()):
                raise IntegrityError(f"free slot {slot} has state left")
        self.pages.check_integrity(used)
        num_constrained = sum(request.is_constrained for request in self.requests())
        if num_constrained != self.num_constrained:
            raise IntegrityError(
                f"{num_constrained} requests have a grammar, {self.num_constrained} are counted"
            )
        half_prefilled = []
        for request in self.requests():
            self._check_request(request)
            if self.seq_lens[request.slot] < self.prefill_lens[request.slot]:
                half_prefilled.append(request)
        if sorted(half_prefilled, key=lambda request: request.sort_key) != self.prefilling:
            raise IntegrityError(
                f"{len(half_prefilled)} requests are half prefilled, {len(self.prefilling)} listed"
            )

    def _check_request(self, request: Request) -> None:
        slot = request.slot
        if slot == NO_SLOT or self._requests[slot] is not request or request.is_ended:
            raise IntegrityError(f"request {request.request_id} is not at home in slot {slot}")
        num_pages, seq_len = int(self.pages.num_pages[slot]), int(self.seq_lens[slot])
        least = -(-seq_len // self.page_size)
        most = -(-(seq_len + self._max_tokens_in_doubt) // self.page_size)
        if not least <= num_pages <= most:
            raise IntegrityError(f"slot {slot} holds {num_pages} pages for {seq_len} tokens")

    def _per_slot(self) -> tuple[IntArray, ...]:
        return self.seq_lens, self.prefill_lens, self.max_total_lens, self.max_drafts
