"""Prefix cache: a radix tree over token ids whose edges are whole pages.

The idea of a radix tree over KV memory is SGLang's (RadixAttention, Zheng et al. 2024,
arXiv:2312.07104). Partial pages are never shared: a page belongs to the tree or to one request.
Knows no requests and does not own the free pages: evicted pages go to the caller. The order in
which leaves go is workers.kv_cache.eviction_order's; what accounts with a bounded retention keep of
the same paths is workers.kv_cache.bounded_pages'.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.bounded_pages import BoundedPages, Retention
from workers.kv_cache.eviction_order import EvictionHorizon, EvictionOrder
from workers.kv_cache.prefix_cache import InsertResult, PrefixMatch
from workers.kv_cache.radix_node import EMPTY, IntArray, RadixNode

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class RadixCache:
    """One tree per salt; a salt whose tree is empty is forgotten.

    clock gives the time of an access as a number that never falls; a counter will do. retentions:
    of the accounts beside the one that keeps every token.
    """

    def __init__(
        self, page_size: int, clock: Callable[[], int], retentions: Sequence[Retention] = ()
    ) -> None:
        self._page_size = page_size
        self._clock = clock
        self._roots: dict[str, RadixNode] = {}
        self._nothing = RadixNode.root("")
        self._eviction_order = EvictionOrder(clock)
        self._num_evictable = 0
        self._bounded = tuple(
            BoundedPages(account, retention, page_size)
            for account, retention in enumerate(retentions)
        )

    @property
    def num_evictable_pages(self) -> int:
        # A locked node has locked ancestors only, so that everything unlocked can be peeled off
        # from the leaves.
        return self._num_evictable

    def num_evictable_bounded(self, account: int) -> int:
        return self._bounded[account].num_evictable_pages

    @property
    def eviction_horizon(self) -> EvictionHorizon:
        return self._eviction_order.horizon

    def match_prefix(self, token_ids: IntArray, salt: str) -> PrefixMatch:
        """The longest cached prefix of token_ids, int32 (any length), in whole pages, behind which
        every account can go on.

        Keeps that prefix young. Nothing is locked; the match holds until the next evict().
        """
        root = self._roots.get(salt)
        if root is None:
            return PrefixMatch(EMPTY, self._nothing, (EMPTY,) * len(self._bounded))
        node, parts = self._descend(root, token_ids)
        return self._match(node, np.concatenate(parts) if parts else EMPTY)

    def count_return(self, node: RadixNode) -> None:
        """A request that the cache had not seen before goes on from node, of the tree's."""
        above = node.parent
        while above is not None:
            above.num_returns += 1
            above = above.parent

    def insert(
        self,
        token_ids: IntArray,
        pages: IntArray,
        salt: str,
        bounded_pages: tuple[IntArray, ...] = (),
    ) -> InsertResult:
        """Offer pages int32 (n,) that hold token_ids int32 (n * page_size,), and those of the
        bounded accounts, 0 where the caller has none.

        The tree takes the pages of what it did not have and keeps its own for the rest.
        Raises IntegrityError when lengths do not fit.
        """
        if len(token_ids) != len(pages) * self._page_size:
            raise IntegrityError(
                f"{len(pages)} pages of {self._page_size} cannot hold {len(token_ids)} tokens"
            )
        if [len(own) for own in bounded_pages] != [len(pages)] * len(self._bounded):
            raise IntegrityError("every account must say what it keeps of the pages")
        if len(pages) == 0:
            root = self._roots.get(salt, self._nothing)
            return InsertResult(EMPTY, root, (EMPTY,) * len(self._bounded))
        root = self._roots.setdefault(salt, RadixNode.root(salt))
        node, parts = self._descend(root, token_ids)
        num_known = sum(len(part) for part in parts)
        if num_known < len(pages):
            rest = token_ids[num_known * self._page_size :].copy()
            node = self._add_leaf(node, rest, pages[num_known:].copy())
            parts.append(node.pages)
        if self._bounded:
            self._fill(node, bounded_pages)
        kept = tuple(node.path_bounded_pages(account) for account in range(len(self._bounded)))
        return InsertResult(np.concatenate(parts), node, kept)

    def lock(self, node: RadixNode) -> None:
        while node.parent is not None:
            if node.lock_count == 0:
                self._num_evictable -= len(node.pages)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        while node.parent is not None:
            if node.lock_count == 0:
                raise IntegrityError("a prefix was unlocked more often than it was locked")
            node.lock_count -= 1
            if node.lock_count == 0:
                self._num_evictable += len(node.pages)
                self._eviction_order.offer(node)
            node = node.parent

    def hold(self, node: RadixNode, account: int) -> None:
        """Keep what a request behind a locked node can still see of a bounded account; counted."""
        self._bounded[account].hold(node, self._split)

    def unhold(self, node: RadixNode, account: int) -> None:
        self._bounded[account].unhold(node)

    def evict(self, num_pages: int) -> tuple[IntArray, ...]:
        """Drop leaves in the eviction order, the last of them only as far as needed.

        Returns the pages, int32, min(num_pages, num_evictable_pages) of them, and what each bounded
        account kept of the same tokens.
        """
        freed: list[list[IntArray]] = [[] for _ in range(1 + len(self._bounded))]
        missing = num_pages
        while missing > 0:
            leaf = self._eviction_order.take()
            if leaf is None:
                break
            cut = self._cut_tail(leaf, missing)
            missing -= len(cut[0])
            for of_account, pages in zip(freed, cut, strict=True):
                of_account.append(pages)
        return tuple(np.concatenate(parts) if parts else EMPTY for parts in freed)

    def evict_bounded(self, num_pages: int, account: int) -> IntArray:
        """Pages of one bounded account that nobody can see, int32, at most num_pages of them."""
        return self._bounded[account].evict(num_pages)

    def all_pages(self) -> IntArray:
        parts = [node.pages for node in self._nodes()]
        return np.concatenate(parts) if parts else EMPTY

    def all_bounded_pages(self, account: int) -> IntArray:
        parts = [node.bounded_pages[account] for node in self._nodes()]
        pages = np.concatenate(parts) if parts else EMPTY
        kept: IntArray = pages[pages != 0]
        return kept

    def check_integrity(
        self,
        holders: Iterable[RadixNode],
        bounded_holders: Sequence[Iterable[RadixNode]] = (),
    ) -> None:
        """Raise IntegrityError unless links, lengths, totals and locks fit together.

        holders: the node of every lock that should exist, one entry a lock. bounded_holders: the
        same of the holds of each bounded account.
        """
        for bounded, of_account in zip(self._bounded, bounded_holders, strict=True):
            bounded.check_integrity(self._nodes(), of_account)
        expected: dict[int, int] = {}
        for holder in holders:
            node = holder
            while node.parent is not None:
                expected[id(node)] = expected.get(id(node), 0) + 1
                node = node.parent
        num_evictable = 0
        for node in self._nodes():
            self._check_node(node, expected.pop(id(node), 0))
            if node.lock_count == 0:
                num_evictable += len(node.pages)
        if expected:
            raise IntegrityError(f"{len(expected)} locked nodes are no longer in the tree")
        if num_evictable != self._num_evictable:
            raise IntegrityError(
                f"the tree holds {num_evictable} evictable pages, {self._num_evictable} are counted"
            )

    def _descend(self, root: RadixNode, token_ids: IntArray) -> tuple[RadixNode, list[IntArray]]:
        """Walk as far as whole pages agree, splitting the last edge if it agrees in part."""
        now = self._clock()
        page_size = self._page_size
        node, position = root, 0
        parts: list[IntArray] = []
        while len(token_ids) - position >= page_size:
            child = node.children.get(token_ids[position : position + page_size].tobytes())
            if child is None:
                break
            num_common = child.num_common_pages(token_ids[position:], page_size)
            if num_common < len(child.pages):
                child = self._split(child, num_common)
            child.last_access = now
            parts.append(child.pages)
            position += num_common * page_size
            node = child
        return node, parts

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """As RadixNode.split; what is above stays within reach of eviction."""
        upper = node.split(num_pages, self._page_size)
        for bounded in self._bounded:
            bounded.offer(upper)
        return upper

    def _match(self, node: RadixNode, pages: IntArray) -> PrefixMatch:
        """pages: of the whole path to node."""
        if not self._bounded:
            return PrefixMatch(pages, node)
        return self._resumable_match(node, pages)

    def _resumable_match(self, node: RadixNode, pages: IntArray, *others: Flags) -> PrefixMatch:
        """The longest part of the path to node behind which every account can go on, and others
        say yes: for each number of pages 0 .. n, with 0 always yes."""
        kept = [node.path_bounded_pages(account) for account in range(len(self._bounded))]
        of_accounts = [
            bounded.resumable(own) for bounded, own in zip(self._bounded, kept, strict=True)
        ]
        can_resume = np.logical_and.reduce([*of_accounts, *others])
        num_pages = int(np.flatnonzero(can_resume)[-1])
        end = self._node_at(node, num_pages)
        return PrefixMatch(pages[:num_pages], end, tuple(own[:num_pages] for own in kept))

    def _node_at(self, node: RadixNode, num_pages: int) -> RadixNode:
        """The node that ends behind the first num_pages pages of the path to node."""
        position = node.num_path_pages()
        while position > num_pages:
            start = position - len(node.pages)
            if start < num_pages:
                return self._split(node, num_pages - start)
            assert node.parent is not None
            node, position = node.parent, start
        return node

    def _fill(self, node: RadixNode, bounded_pages: tuple[IntArray, ...]) -> None:
        """The path down to node takes what its accounts lack."""
        start = 0
        for member in node.path():
            stop = start + len(member.pages)
            for bounded, own in zip(self._bounded, bounded_pages, strict=True):
                bounded.fill(member, own[start:stop])
            start = stop

    def _add_leaf(self, parent: RadixNode, tokens: IntArray, pages: IntArray) -> RadixNode:
        nothing = tuple(np.zeros(len(pages), dtype=np.int32) for _ in self._bounded)
        leaf = RadixNode(tokens, pages, parent, nothing)
        leaf.last_access = self._clock()
        parent.children[tokens[: self._page_size].tobytes()] = leaf
        parent.num_continuations += 1
        self._num_evictable += len(pages)
        self._eviction_order.offer(leaf)
        return leaf

    def _cut_tail(self, leaf: RadixNode, max_pages: int) -> tuple[IntArray, ...]:
        """Take up to max_pages off the leaf's end, and what bounded accounts keep of them."""
        num_cut = min(max_pages, len(leaf.pages))
        cut = leaf.pages[len(leaf.pages) - num_cut :]
        kept = tuple(bounded.take_tail(leaf, num_cut) for bounded in self._bounded)
        if num_cut < len(leaf.pages):
            leaf.cut(len(leaf.pages) - num_cut, self._page_size)
        else:
            self._detach(leaf)
        self._num_evictable -= num_cut
        return cut, *kept

    def _detach(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self._page_size].tobytes()]
        leaf.parent = None
        for bounded in self._bounded:
            bounded.forget(leaf)
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        else:
            self._eviction_order.offer(parent)

    def _nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: RadixNode, num_users: int) -> None:
        if len(node.pages) == 0 or len(node.tokens) != len(node.pages) * self._page_size:
            raise IntegrityError(
                f"an edge of {len(node.tokens)} tokens has {len(node.pages)} pages "
                f"of {self._page_size}"
            )
        key = node.tokens[: self._page_size].tobytes()
        if node.parent is None or node.parent.children.get(key) is not node:
            raise IntegrityError("a node is not where its parent looks for it")
        if node.lock_count != num_users:
            raise IntegrityError(f"a node is locked {node.lock_count} times by {num_users} users")
        if node.is_evictable_leaf and not node.is_queued:
            raise IntegrityError("an unused leaf is out of reach of eviction")
