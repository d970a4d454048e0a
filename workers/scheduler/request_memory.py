"""The pages of running requests: taking them, sharing them with the prefix cache, giving them back.

A page belongs to exactly one of: the free stock, the prefix cache, one request.

Keys and values are known to be numbers once a final state that attended to them is: that of a
chunk's last token, or what logits were made of. Those of a request that ends before that are never
shared, and are cleared before their pages serve anybody else: an attention kernel may load a page's
unused tail and multiply it by zero, and NaN times zero is NaN.

Which pages a slot has is slot_pages.py; bounded_memory.py is for accounts that do not keep every
token.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from workers.kv_cache.radix_node import EMPTY
from workers.scheduler.adapter_memory import AdapterMemory
from workers.scheduler.bounded_memory import BoundedMemory
from workers.scheduler.encoder_memory import EncoderMemory
from workers.scheduler.media_memory import MediaMemory
from workers.scheduler.page_row import Replaced
from workers.scheduler.plan import IntArray, TableWrite
from workers.scheduler.request import Request
from workers.scheduler.running_table import RunningTable
from workers.scheduler.snapshot_memory import SnapshotMemory


class RequestMemory:
    """Moves pages between the pool, the cache and the running table."""

    def __init__(
        self,
        table: RunningTable,
        pool: PagePool,
        cache: PrefixCache,
        bounded: BoundedMemory,
        encoders: Sequence[EncoderMemory],
        states: Sequence[SnapshotMemory],
        media: Sequence[MediaMemory],
        adapters: Sequence[AdapterMemory],
    ) -> None:
        """states: every change of pages here is told there. media, adapters: who has a slot is told
        there. Callers plan steps with all of them. lets_go_of_tokens: whether some layers see a
        token for a while only."""
        self.states = states
        self.media = media
        self.adapters = adapters
        self.lets_go_of_tokens = bounded.num_accounts > 0
        self._table = table
        self._pages = table.pages
        self._pool = pool
        self._cache = cache
        self._bounded = bounded
        self._encoders = encoders
        self._page_size = table.page_size
        self._table_writes: dict[int, list[TableWrite]] = {}
        # By account.
        self._nothing_cleared = (EMPTY,) * (1 + bounded.num_accounts)
        self._cleared: tuple[list[IntArray], ...] = tuple([] for _ in self._nothing_cleared)

    def match_and_lock(self, request: Request) -> PrefixMatch:
        """The cached prefix of the request's tokens, locked; at least one token is left to compute.

        A request that needs its whole prompt's final states finds none.
        """
        num_matchable = 0 if request.needs_whole_prompt else request.num_tokens - 1
        match = self._cache.match_prefix(request.cache_keys(num_matchable), request.cache_salt)
        self._cache.lock(match.node)
        self._bounded.hold(match.node)
        return match

    def unlock(self, match: PrefixMatch) -> None:
        self._bounded.unhold(match.node)
        self._cache.unlock(match.node)

    def fits_others(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the accounts beside the one that keeps every token have room for the request,
        too."""
        return self._bounded.fits(request, match) and all(
            memory.fits(request) for memory in self._encoders
        )

    def num_encoder_tokens(self, request: Request) -> int:
        """Tokens that an encoder would have to compute for the request now."""
        return sum(memory.num_missing_tokens(request) for memory in self._encoders)

    def count_return(self, match: PrefixMatch) -> None:
        """The request that found this match is admitted for the first time."""
        self._cache.count_return(match.node)

    def open(self, request: Request, match: PrefixMatch) -> None:
        """Give the request a slot that starts with the locked match."""
        request.prefill_len = request.num_tokens
        request.num_vouched_tokens = len(match.pages) * self._page_size
        self._table.add(request, match)
        for memory in self._encoders:
            memory.open(request)
        self._write_later(request.slot, self._bounded.open(request.slot, match))
        for states in self.states:
            states.open(request, match)
        for media in self.media:
            media.open(request)
        for adapters in self.adapters:
            adapters.open(request)

    def extend(self, slot: int, num_tokens: int) -> int:
        """Make room for up to num_tokens more tokens; returns for how many there is.

        seq_lens grows by as much.
        """
        table, page_size = self._table, self._page_size
        seq_len, num_pages = int(table.seq_lens[slot]), int(self._pages.num_pages[slot])
        max_len = (num_pages + self._pool.num_available_pages) * page_size
        num_granted = min(num_tokens, max_len - seq_len)
        num_new_pages = -(-(seq_len + num_granted) // page_size) - num_pages
        pages = self._pool.allocate(num_new_pages)
        if pages is None:
            return 0
        self._pages.grow(slot, pages)
        table.seq_lens[slot] = seq_len + num_granted
        return num_granted

    def share_prefix(self, request: Request) -> None:
        """Offer the full pages of a finished prefill to the cache, so that others can use them.
        What no token to come can see goes back now: the request's next page may be long in coming,
        and nobody is admitted into what it keeps until then."""
        for memory in self._encoders:
            memory.vouch(request)
        self._share(request, request.prefill_len // self._page_size)
        for states in self.states:
            states.share(request)
        if self._bounded.num_accounts:
            self._drop_unseen(request, request.num_vouched_tokens)

    def pass_chunk(self, request: Request, num_computed: int) -> None:
        """Chunks of an unfinished prefill have been computed, num_computed tokens: what its next
        ones cannot see goes back, by way of the cache, where others may come upon it."""
        for memory in self._encoders:
            memory.vouch(request)
        if self._bounded.num_accounts:
            self._share(request, request.num_vouched_tokens // self._page_size)
            self._drop_unseen(request, num_computed)

    def drop_unseen(self, requests: Iterable[Request]) -> None:
        """Give back what no later token of these, which decode, can see."""
        for request in requests:
            self._drop_unseen(request, request.num_vouched_tokens)

    def _drop_unseen(self, request: Request, num_computed: int) -> None:
        for account, indices in self._bounded.drop_unseen(request, num_computed):
            self._cleared[1 + account].append(indices)

    def _share(self, request: Request, num_full: int) -> None:
        """Offer so many full pages to the cache.

        Where the cache already has a page of the same tokens, the request moves to it with the
        next plan. A step under way may still read the pages that are freed here: whoever gets them
        writes to them in a later step.
        """
        slot = request.slot
        result = self._insert(request, num_full)
        if result is None:
            return
        self._cache.lock(result.node)
        node = self._pages.node_of(slot)
        replaced = self._pages.give_to_cache(slot, result)
        self._pool.free([one.pages for one in replaced])
        self._write_later(slot, _moves(slot, replaced))
        self._bounded.move_holds(slot, node)
        self._cache.unlock(node)

    def _insert(self, request: Request, num_full: int) -> InsertResult | None:
        """What became of the offer of so many full pages; None where all are the cache's."""
        slot = request.slot
        if num_full <= self._pages.num_shared[slot]:
            return None
        keys = request.cache_keys(num_full * self._page_size)
        pages, *bounded = self._pages.offer(slot, num_full)
        return self._cache.insert(keys, pages, request.cache_salt, tuple(bounded))

    def release(self, request: Request) -> None:
        """Take the request's slot and pages; full pages of vouched tokens go to the cache."""
        result = self._insert(request, request.num_vouched_tokens // self._page_size)
        node = self._pages.node_of(request.slot) if result is None else result.node
        for states in self.states:
            states.leave(request, node)
        self._clear_from(request.slot, request.num_vouched_tokens)
        self._close(request, result)

    def discard(self, request: Request) -> None:
        """Take the slot and pages of a request whose keys and values nobody may read again."""
        self._clear_from(request.slot, 0)
        self._close(request, None)

    def _clear_from(self, slot: int, first_token: int) -> None:
        """Of the slot's own pages. Steps under way may still write there; what is cleared is
        cleared after them."""
        stop = self._table.written_len(slot)
        if stop <= first_token:
            return
        for account, cleared in enumerate(self._cleared):
            cleared.append(self._pages.own_indices(slot, account, first_token, stop))

    def _close(self, request: Request, result: InsertResult | None) -> None:
        slot, node = request.slot, self._pages.node_of(request.slot)
        self._bounded.let_go(slot)
        for memory in self._encoders:
            memory.close(request)
        self._table_writes.pop(slot, None)
        for states in self.states:
            states.close(request)
        for media in self.media:
            media.close(request)
        for adapters in self.adapters:
            adapters.close(request)
        self._pool.free(self._table.remove(request, result))
        self._cache.unlock(node)

    def _write_later(self, slot: int, writes: Iterable[TableWrite]) -> None:
        for write in writes:
            self._table_writes.setdefault(slot, []).append(write)

    def take_table_writes(self) -> list[TableWrite]:
        """Moves to shared pages, and cached ones of bounded accounts that admitted requests begin
        with, which the next plan must carry out in this order."""
        if not self._table_writes:
            return []
        writes = [write for of_slot in self._table_writes.values() for write in of_slot]
        self._table_writes.clear()
        return writes

    def take_cleared(self) -> tuple[IntArray, ...]:
        """Cache indices that the next plan must clear, int32 (n,) by account: it is the first that
        may hand their pages to somebody else."""
        if not any(self._cleared):
            return self._nothing_cleared
        taken = tuple(np.concatenate(parts) if parts else EMPTY for parts in self._cleared)
        for parts in self._cleared:
            parts.clear()
        return taken


def _moves(slot: int, replaced: Sequence[Replaced]) -> Iterator[TableWrite]:
    """Of the slot's rows, by account, to the pages that have taken the place of its own."""
    for account, one in enumerate(replaced):
        if len(one.pages):
            yield TableWrite(np.array([slot], dtype=np.int32), one.first, one.entries, account)
