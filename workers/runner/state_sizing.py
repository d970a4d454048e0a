"""How much memory states take: those of slots, and snapshots of them. Allocates nothing."""

import logging
from collections.abc import Sequence
from typing import Protocol

from attention.memory.slot_states import SlotStates, StateEntry
from workers.config import EngineConfig
from workers.models.base import CausalLM

logger = logging.getLogger(__name__)

MIN_SNAPSHOTS = 16
"""For few requests at a time: each leaves two, at the ends of its prompt and of its output."""


class KeepsStates(Protocol):
    """As CausalLM says it."""

    @property
    def state_entries(self) -> tuple[StateEntry, ...]: ...
    @property
    def continues_states(self) -> bool: ...


def bytes_per_slot(entries: Sequence[StateEntry]) -> int:
    """Of one slot's states, and of one snapshot."""
    return sum(entry.bytes_per_slot for entry in entries)


def state_bytes_of(num_slots: int, entries: Sequence[StateEntry]) -> int:
    """Of all slots, those that no request owns included."""
    return num_slots * bytes_per_slot(entries)


def num_snapshots_of(config: EngineConfig, model: KeepsStates, free_bytes: int) -> int:
    """How many snapshots the engine keeps; 0 without a prefix cache.

    Where the configuration does not say: as many as requests may run and MIN_SNAPSHOTS at least,
    but at most half of free_bytes, what KV memory has beside the states of slots; none where the
    model takes tokens on top of a state one by one, so that a cached prefix would cost more than it
    saves.
    """
    if not model.state_entries or not config.enable_prefix_cache:
        return 0
    if config.num_state_snapshots is not None:
        return config.num_state_snapshots
    if not model.continues_states:
        return 0
    most = free_bytes // 2 // bytes_per_slot(model.state_entries)
    return max(0, min(max(config.max_running_requests, MIN_SNAPSHOTS), most))


def tell_of_states(
    config: EngineConfig, model: CausalLM, architecture: str, states: Sequence[SlotStates]
) -> None:
    """Log what the states of a model that keeps any take, and where its prefixes cannot be cached
    for want of snapshots."""
    for kept in states:
        logger.info(
            "%d modules keep a state for each of %d slots and %d snapshots, %d bytes in all",
            len(model.state_entries),
            config.max_running_requests,
            kept.num_snapshots,
            kept.num_bytes,
        )
        if config.enable_prefix_cache and not kept.num_snapshots:
            logger.warning(
                "without a prefix cache: %s keeps states and there are no snapshots of them to "
                "continue a cached prefix (num_state_snapshots)",
                architecture,
            )
