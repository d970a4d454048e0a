"""One node of the radix tree: an edge of whole pages and what hangs below it.

Knows its neighbours and its own counts; totals and the order of eviction are the cache's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

EMPTY: IntArray = np.zeros(0, dtype=np.int32)
EMPTY.flags.writeable = False

NO_SNAPSHOT = -1


class RadixNode:
    """tokens int32 (n * page_size,) of the edge that leads here, pages int32 (n,) that hold them.

    children are keyed by the bytes of their first page of tokens. A root has no parent, no tokens
    and no lock. lock_count counts the users of this node or of any node below, so that a locked
    node never hangs under an unlocked one. is_queued: the eviction order has an entry for it.
    bounded_pages: of each account with a bounded retention int32 (n,), 0 where the account keeps
    nothing any more. holds: of each of them, how many users still see tokens of this node.
    is_offered: of each of them, whether its order of eviction has an entry for the node.
    num_continuations: texts that ever went on from here, evicted ones among them; one that comes
    back after its eviction counts again. num_returns: requests that began with more than this node,
    with one of its continuations at least in part. snapshot: where the states after the node's last
    token are kept, NO_SNAPSHOT where they are not or a model has none.
    """

    __slots__ = (
        "bounded_pages",
        "children",
        "holds",
        "is_offered",
        "is_queued",
        "last_access",
        "lock_count",
        "num_continuations",
        "num_returns",
        "pages",
        "parent",
        "salt",
        "snapshot",
        "tokens",
    )

    def __init__(
        self,
        tokens: IntArray,
        pages: IntArray,
        parent: RadixNode | None,
        bounded_pages: tuple[IntArray, ...] = (),
    ) -> None:
        self.tokens = tokens
        self.pages = pages
        self.bounded_pages = bounded_pages
        self.holds = [0] * len(bounded_pages)
        self.is_offered = [False] * len(bounded_pages)
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.num_continuations = 0
        self.num_returns = 0
        self.last_access = 0
        self.is_queued = False
        self.snapshot = NO_SNAPSHOT
        self.salt: str = "" if parent is None else parent.salt

    @classmethod
    def root(cls, salt: str) -> RadixNode:
        node = cls(EMPTY, EMPTY, None)
        node.salt = salt
        return node

    @property
    def is_evictable_leaf(self) -> bool:
        return self.lock_count == 0 and not self.children and self.parent is not None

    @property
    def is_shared(self) -> bool:
        """More than one text went through here and on."""
        return self.num_continuations > 1

    def path(self) -> list[RadixNode]:
        """The nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_pages(self) -> IntArray:
        """The pages from the root down to this node, int32."""
        parts = [node.pages for node in self.path()]
        return np.concatenate(parts) if parts else EMPTY

    def num_path_pages(self) -> int:
        """How many pages stand on the path from the root down to this node."""
        return sum(len(node.pages) for node in self.path())

    def path_bounded_pages(self, account: int) -> IntArray:
        """Of one bounded account, as path_pages: 0 where it keeps nothing."""
        parts = [node.bounded_pages[account] for node in self.path()]
        return np.concatenate(parts) if parts else EMPTY

    def num_common_pages(self, tokens: IntArray, page_size: int) -> int:
        """How many whole pages of this edge tokens (any length) begins with."""
        n = min(len(self.tokens), len(tokens))
        differs = self.tokens[:n] != tokens[:n]
        first = int(differs.argmax()) if n else 0
        if n and not differs[first]:
            first = n
        return first // page_size

    def cut(self, num_pages: int, page_size: int) -> None:
        """Keep the first num_pages of the edge of a leaf: at least one, and not all."""
        self.pages = self.pages[:num_pages]
        self.bounded_pages = tuple(pages[:num_pages] for pages in self.bounded_pages)
        self.tokens = self.tokens[: num_pages * page_size]
        self.num_continuations = max(1, self.num_continuations)

    def split(self, num_pages: int, page_size: int) -> RadixNode:
        """Put a node for the edge's first num_pages pages above this one and return it.

        This node keeps its identity and the rest of the edge, so that whoever holds it holds the
        same path as before.
        """
        assert self.parent is not None
        cut = num_pages * page_size
        of_bounded = tuple(pages[:num_pages] for pages in self.bounded_pages)
        upper = RadixNode(self.tokens[:cut], self.pages[:num_pages], self.parent, of_bounded)
        upper.lock_count = self.lock_count
        upper.holds = self.holds.copy()
        # Whoever went on or came back below this node did so below the new one, too.
        upper.num_continuations = max(1, self.num_continuations)
        upper.num_returns = self.num_returns
        upper.last_access = self.last_access
        self.parent.children[upper.tokens[:page_size].tobytes()] = upper
        self.tokens = self.tokens[cut:]
        self.pages = self.pages[num_pages:]
        self.bounded_pages = tuple(pages[num_pages:] for pages in self.bounded_pages)
        self.parent = upper
        upper.children[self.tokens[:page_size].tobytes()] = self
        return upper
