"""How many tokens and requests a GPU's memory holds beside a rank's weights. Allocates nothing."""

from dataclasses import dataclass

from attention.config import AttentionConfig
from attention.memory.slot_states import StateEntry
from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.kv_cache.bounded_pages import span_pages
from workers.runner.page_counts import pages_by_account
from workers.runner.state_sizing import bytes_per_slot, num_snapshots_of, state_bytes_of
from workers.survey.meta_model import MetaModel
from workers.survey.words import GIB, size

_PADDING_SLOTS = 1
"""Of a runner on a GPU: padded rows of a captured step have states of their own."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Of one GPU of gpu_memory_gib. kv_bytes: for KV memory; states: of requests' slots and of
    num_snapshots among them, None where they are not known and left out of all that follows.
    num_tokens: that all requests together may hold. num_requests: at a time, of request_tokens
    each, prompt and output, without a prefix in common; num_longest: of the longest context."""

    gpu_memory_gib: float
    kv_bytes: int
    state_bytes: int | None
    num_snapshots: int
    num_tokens: int
    request_tokens: int
    num_requests: int
    num_longest: int


@dataclass(frozen=True, slots=True)
class _States:
    """Of a model whose states are known."""

    state_entries: tuple[StateEntry, ...]
    continues_states: bool


def fit_on_gpu(
    config: EngineConfig,
    attention: AttentionConfig,
    meta: MetaModel,
    gpu_memory_gib: float,
    request_tokens: int,
) -> Fit:
    """By the sizing of a real start, which has less: CUDA's context, activations and graphs are not
    counted. Raises ConfigError where no page is left."""
    kv_bytes = kv_bytes_beside(config, meta, gpu_memory_gib)
    state_bytes, num_snapshots = _states_in(config, meta, kv_bytes)
    pages = pages_by_account(config, attention, kv_bytes - state_bytes, state_bytes)

    def at_a_time(tokens: int) -> int:
        most = _requests(attention, pages, tokens)
        return min(most, config.max_running_requests)

    return Fit(
        gpu_memory_gib,
        kv_bytes,
        None if meta.state_entries is None else state_bytes,
        num_snapshots,
        (pages[0] - NUM_RESERVED_PAGES) * attention.page_size,
        request_tokens,
        at_a_time(request_tokens),
        at_a_time(attention.max_context_len),
    )


def kv_bytes_beside(config: EngineConfig, meta: MetaModel, gpu_memory_gib: float) -> int:
    """What a rank's weights and the slots of adapters leave. Raises ConfigError where that is
    nothing."""
    usable_bytes = int(gpu_memory_gib * GIB * config.gpu_memory_fraction)
    if meta.weight_bytes >= usable_bytes:
        raise ConfigError(
            f"the weights of a rank alone, {size(meta.weight_bytes)}, are larger than the memory "
            f"for them, {size(usable_bytes)}: gpu_memory_fraction {config.gpu_memory_fraction:g} "
            f"of {gpu_memory_gib:g} GiB"
        )
    kv_bytes = usable_bytes - meta.weight_bytes - meta.adapter_bytes
    if kv_bytes <= 0:
        raise ConfigError(
            f"the slots of max_loras={config.max_loras} adapters, {size(meta.adapter_bytes)}, are "
            f"larger than the {size(usable_bytes - meta.weight_bytes)} that are left beside the "
            "weights"
        )
    return kv_bytes


def _states_in(config: EngineConfig, meta: MetaModel, kv_bytes: int) -> tuple[int, int]:
    """(bytes of slots and snapshots, snapshots). Raises ConfigError where slots take everything."""
    states = _States(meta.state_entries or (), meta.continues_states)
    num_slots = config.max_running_requests + (_PADDING_SLOTS if config.device == "cuda" else 0)
    state_bytes = state_bytes_of(num_slots, states.state_entries)
    if state_bytes >= kv_bytes:
        raise ConfigError(
            f"the states of {config.max_running_requests} requests, {size(state_bytes)}, are "
            f"larger than the {size(kv_bytes)} that are left beside the weights"
        )
    num_snapshots = num_snapshots_of(config, states, kv_bytes - state_bytes)
    return state_bytes + num_snapshots * bytes_per_slot(states.state_entries), num_snapshots


def _requests(attention: AttentionConfig, pages: tuple[int, ...], tokens: int) -> int:
    own = -(-tokens // attention.page_size)
    fits = [(pages[0] - NUM_RESERVED_PAGES) // own]
    for kept, num_pages in zip(attention.bounded_retentions, pages[1:], strict=False):
        seen = min(own, span_pages(kept, attention.page_size))
        fits.append((num_pages - NUM_RESERVED_PAGES) // seen)
    return min(fits)
