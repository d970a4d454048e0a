"""How many pages an encoder's account gets of the bytes for KV memory. Allocates nothing."""

from attention.config import AttentionConfig
from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES
from workers.config import EngineConfig
from workers.errors import ConfigError


def encoder_page_bytes(attention: AttentionConfig) -> int:
    """Over all layers that see an encoder's tokens."""
    return attention.kv_bytes_of_account(attention.encoder_account) * attention.page_size


def encoder_page_count(config: EngineConfig, attention: AttentionConfig, budget_bytes: int) -> int:
    """The reserved page is counted.

    For as many requests as have room together with a full context of their own, but no more than
    may run, and one at least. With config.num_pages set, as many pages as that, or one request's.
    Raises ConfigError where the bytes do not hold what the encoder makes of one request.
    """
    page_size = attention.page_size
    own_pages = -(-attention.max_encoder_tokens // page_size)
    most = config.max_running_requests * own_pages
    if config.num_pages is not None:
        return max(own_pages, min(config.num_pages, most)) + NUM_RESERVED_PAGES
    one_encoder = own_pages * encoder_page_bytes(attention)
    accounts = range(attention.encoder_account)
    token_bytes = sum(attention.kv_bytes_of_account(account) for account in accounts)
    one_context = -(-attention.max_context_len // page_size) * page_size * token_bytes
    num_requests = budget_bytes // (one_encoder + one_context)
    num_pages = min(max(1, num_requests) * own_pages, most) + NUM_RESERVED_PAGES
    if num_pages * encoder_page_bytes(attention) > budget_bytes:
        raise ConfigError(
            f"{budget_bytes} bytes for KV memory do not hold the {attention.max_encoder_tokens} "
            f"tokens that the encoder makes of one request, {one_encoder} bytes"
        )
    return num_pages
