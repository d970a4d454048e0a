"""Small radix caches for tests, with plain lists of tokens and pages."""

import itertools

import numpy as np

from workers.kv_cache.prefix_cache import InsertResult, PrefixMatch
from workers.kv_cache.radix_cache import RadixCache


def ints(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]


def make_cache(page_size: int = 2) -> RadixCache:
    return RadixCache(page_size, clock=itertools.count(1).__next__)


def insert(cache: RadixCache, tokens: list[int], pages: list[int], salt: str = "") -> InsertResult:
    return cache.insert(ints(tokens), ints(pages), salt)


def match(cache: RadixCache, tokens: list[int], salt: str = "") -> PrefixMatch:
    return cache.match_prefix(ints(tokens), salt)
