"""A slot's row of one account's page table: entry i is the page of its i-th page of tokens."""

from typing import NamedTuple

import numpy as np

from workers.kv_cache.radix_node import IntArray


class Replaced(NamedTuple):
    """Pages of a slot's own that it has lost to others, int32 (n,). Its row from entry first on now
    holds entries int32 (m,), which begin and end where such a page was; none where n is 0."""

    pages: IntArray
    first: int
    entries: IntArray


def replace_own(row: IntArray, entries: IntArray, own_start: int) -> Replaced:
    """Write entries, int32 (n,), over the beginning of a row, int32 (columns,), whose pages are the
    slot's own from own_start on."""
    n = len(entries)
    lost = own_start + np.flatnonzero(row[own_start:n] != entries[own_start:])
    pages = row[lost]
    row[:n] = entries
    if not len(lost):
        return Replaced(pages, 0, pages)
    first, last = int(lost[0]), int(lost[-1])
    return Replaced(pages, first, entries[first : last + 1])


def token_indices(row: IntArray, page_size: int, start: int, stop: int) -> IntArray:
    """Where tokens start .. stop - 1 stand in the account's pool, int32 (max(stop - start, 0),)."""
    size = np.int32(page_size)
    positions = np.arange(start, stop, dtype=np.int32)
    indices: IntArray = row[positions // size] * size + positions % size
    return indices
