"""How many pages each account of KV memory gets of a number of bytes. Allocates nothing."""

from collections.abc import Sequence

from attention.config import AttentionConfig
from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.kv_cache.bounded_pages import Retention, span_pages
from workers.runner.account_shares import bounded_share
from workers.runner.encoder_page_count import encoder_page_bytes, encoder_page_count
from workers.scheduler.config import BoundedAccount

_VIRTUAL_PAGES_A_REAL_ONE = 4
"""Where no layer keeps every token, account 0 only counts: how many more tokens the prefix cache
may know than the other accounts hold."""


def pages_by_account(
    config: EngineConfig, attention: AttentionConfig, budget_bytes: int, state_bytes: int = 0
) -> tuple[int, ...]:
    """Of account 0, then of each bounded one, then of the encoder; the reserved page is counted in
    all. state_bytes: what recurrent states have taken before. Raises ConfigError where the bytes
    hold no page."""
    if not attention.max_encoder_tokens:
        return _own_pages(config, attention, budget_bytes, state_bytes)
    encoder_pages = encoder_page_count(config, attention, budget_bytes)
    left_bytes = budget_bytes - encoder_pages * encoder_page_bytes(attention)
    return *_own_pages(config, attention, left_bytes, state_bytes), encoder_pages


def _own_pages(
    config: EngineConfig, attention: AttentionConfig, budget_bytes: int, state_bytes: int
) -> tuple[int, ...]:
    """Of the accounts of requests' own tokens.

    A bounded account gets what all running requests can hold at once, of a cached prefix and of
    their own, and prompts on their way through it; account 0 gets the rest, but no more than every
    slot at full context can use. The bounded ones get bounded_share of the bytes at most. Where one
    request has no room in that, all have equally many pages.
    """
    most = _most_pages(config, attention)
    wanted = [
        min(most, _wanted_pages(config, kept, attention.page_size))
        for kept in attention.bounded_retentions
    ]
    if config.num_pages is not None:
        num_pages = config.num_pages + NUM_RESERVED_PAGES
        return num_pages, *(min(pages, num_pages) for pages in wanted)
    own_bytes, *bounded_bytes = (
        attention.kv_bytes_of_account(account) * attention.page_size
        for account in range(1 + len(wanted))
    )
    all_alike = budget_bytes // (own_bytes + sum(bounded_bytes))
    spans = [span_pages(kept, attention.page_size) for kept in attention.bounded_retentions]
    share = bounded_share(own_bytes, bounded_bytes, spans, _context_pages(attention))
    wanted_bytes = _num_bytes(wanted, bounded_bytes)
    scale = min(1.0, share * budget_bytes / wanted_bytes) if wanted else 1.0
    least = [
        _least_pages(config, kept, attention.page_size) for kept in attention.bounded_retentions
    ]
    bounded = [
        min(want, all_alike, max(int(want * scale), enough))
        for want, enough in zip(wanted, least, strict=True)
    ]
    left_bytes = budget_bytes - _num_bytes(bounded, bounded_bytes)
    if own_bytes:
        num_pages = min(left_bytes // own_bytes, most)
    else:
        num_pages = min(_VIRTUAL_PAGES_A_REAL_ONE * min(bounded) + _context_pages(attention), most)
    # With as many pages as account 0 an account is never the first to run short.
    short = [have for have, enough in zip(bounded, least, strict=True) if have < enough]
    num_pages = min([num_pages, *short])
    if num_pages <= NUM_RESERVED_PAGES:
        page_bytes = own_bytes + sum(bounded_bytes)
        raise ConfigError(_why_no_page(config, budget_bytes, state_bytes, page_bytes))
    return num_pages, *bounded


def _why_no_page(config: EngineConfig, budget_bytes: int, state_bytes: int, page_bytes: int) -> str:
    whole_bytes = budget_bytes + state_bytes
    if whole_bytes <= 0:
        return (
            f"weights, and whatever else is on the device, take {-whole_bytes} bytes more than "
            f"gpu_memory_fraction={config.gpu_memory_fraction:g}: none are left for KV memory"
        )
    beside = (
        f" beside {state_bytes} bytes for the states of {config.max_running_requests} requests"
        " and their snapshots"
        if state_bytes
        else ""
    )
    return f"{budget_bytes} bytes for KV memory hold no page of {page_bytes} bytes{beside}"


def _num_bytes(pages: Sequence[int], page_bytes: Sequence[int]) -> int:
    return sum(num * size for num, size in zip(pages, page_bytes, strict=True))


def _most_pages(config: EngineConfig, attention: AttentionConfig) -> int:
    """More than every slot at full context can use would never be touched."""
    max_tokens = config.max_running_requests * attention.max_context_len
    return -(-max_tokens // attention.page_size) + NUM_RESERVED_PAGES


def _context_pages(attention: AttentionConfig) -> int:
    return -(-attention.max_context_len // attention.page_size) + NUM_RESERVED_PAGES


def _wanted_pages(config: EngineConfig, retention: Retention, page_size: int) -> int:
    a_request = 2 * span_pages(retention, page_size) + 1
    under_way = _pages_under_way(config, page_size)
    return config.max_running_requests * a_request + under_way + NUM_RESERVED_PAGES


def _least_pages(config: EngineConfig, retention: Retention, page_size: int) -> int:
    """With fewer, one request that runs alone would wait for its own pages."""
    alone = BoundedAccount(retention, 0).min_pages(page_size)
    return alone + _pages_under_way(config, page_size)


def _pages_under_way(config: EngineConfig, page_size: int) -> int:
    """Of two steps' prompts: one is computed while the next one is planned."""
    return 2 * -(-config.max_step_tokens // page_size)
