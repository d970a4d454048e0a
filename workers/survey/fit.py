"""How many tokens and requests a GPU's memory holds beside a rank's weights. Allocates nothing."""

from dataclasses import dataclass

from attention.config import AttentionConfig
from attention.memory.slot_states import StateEntry
from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.kv_cache.bounded_pages import span_pages
from workers.runner.page_counts import pages_by_account
from workers.runner.state_sizing import state_bytes_of

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Fit:
    """Of one GPU of gpu_memory_gib. kv_bytes: for KV memory; states: of requests' slots among them.
    num_tokens: that all requests together may hold. num_requests: at a time, of request_tokens
    each, prompt and output, without a prefix in common; num_longest: of the longest context."""

    gpu_memory_gib: float
    kv_bytes: int
    state_bytes: int
    num_tokens: int
    request_tokens: int
    num_requests: int
    num_longest: int


def fit_on_gpu(
    config: EngineConfig,
    attention: AttentionConfig,
    state_entries: tuple[StateEntry, ...],
    weight_bytes: int,
    gpu_memory_gib: float,
    request_tokens: int,
) -> Fit:
    """By the sizing of a real start, which has less: CUDA's context, activations and graphs are not
    counted. Raises ConfigError where no page is left."""
    usable_bytes = int(gpu_memory_gib * GIB * config.gpu_memory_fraction)
    if weight_bytes >= usable_bytes:
        raise ConfigError(
            f"the weights of a rank alone, {_gib(weight_bytes)}, are larger than the memory for "
            f"them, {_gib(usable_bytes)}: gpu_memory_fraction {config.gpu_memory_fraction:g} of "
            f"{gpu_memory_gib:g} GiB"
        )
    kv_bytes = usable_bytes - weight_bytes
    state_bytes = state_bytes_of(config.max_running_requests, state_entries)
    if state_bytes >= kv_bytes:
        raise ConfigError(
            f"the states of {config.max_running_requests} requests, {_gib(state_bytes)}, are "
            f"larger than the {_gib(kv_bytes)} that are left beside the weights"
        )
    pages = pages_by_account(config, attention, kv_bytes - state_bytes, state_bytes)

    def at_a_time(tokens: int) -> int:
        most = _requests(attention, pages, tokens)
        return min(most, config.max_running_requests)

    return Fit(
        gpu_memory_gib,
        kv_bytes,
        state_bytes,
        (pages[0] - NUM_RESERVED_PAGES) * attention.page_size,
        request_tokens,
        at_a_time(request_tokens),
        at_a_time(attention.max_context_len),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _requests(attention: AttentionConfig, pages: tuple[int, ...], tokens: int) -> int:
    own = -(-tokens // attention.page_size)
    fits = [(pages[0] - NUM_RESERVED_PAGES) // own]
    for kept, num_pages in zip(attention.bounded_retentions, pages[1:], strict=False):
        seen = min(own, span_pages(kept, attention.page_size))
        fits.append((num_pages - NUM_RESERVED_PAGES) // seen)
    return min(fits)
