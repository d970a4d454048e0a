"""Which share of KV memory goes to accounts whose tokens are seen for a while only.

How long requests are nobody knows before they come. Short ones need all accounts alike, long ones
hardly more than their windows beside the account that keeps every token. Allocates nothing.
"""

from collections.abc import Sequence


def bounded_share(
    own_bytes: int, bounded_bytes: Sequence[int], spans: Sequence[int], context_pages: int
) -> float:
    """Of all bytes, in (0, 1]. own_bytes, bounded_bytes: of a page of account 0 and of each bounded
    one. spans: pages that one query sees in each of these; context_pages: of the longest request.

    With f for the bounded accounts as many requests fit as f or 1 - f, the scarcer one, allows. The
    best f is s for requests within every window and l for the longest ones; s / (s + 1 - l) is as
    far from the best at either end: for all lengths 1 / (s + 1 - l) of the requests fit that would
    with the best share for these, which is more than half.
    """
    if not own_bytes:
        return 1.0
    shortest = _ratio(sum(bounded_bytes), own_bytes)
    at_most = (min(span, context_pages) for span in spans)
    seen_bytes = sum(n * size for n, size in zip(at_most, bounded_bytes, strict=True))
    longest = _ratio(seen_bytes, context_pages * own_bytes)
    return shortest / (shortest + 1.0 - longest)


def _ratio(part: int, rest: int) -> float:
    return part / (part + rest)
