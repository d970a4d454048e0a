"""What a rank keeps of a request's tokens and of the request itself, for people."""

from dataclasses import dataclass

from attention.config import AttentionConfig
from attention.memory.layout import (
    AccountRetention,
    CurrentChunk,
    EveryToken,
    FixedLength,
    HeadsEntry,
    LastTokens,
    LatentEntry,
)
from attention.memory.slot_states import StateEntry


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """Layers that keep alike. kind: "heads" or "latent". entry: "8 x (128 + 128)". seen: by a
    query. bytes_a_token: over its layers."""

    kind: str
    entry: str
    seen: str
    num_layers: int
    bytes_a_token: int


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Convolution and recurrent states."""

    num_modules: int
    bytes_a_request: int


def kept_groups(attention: AttentionConfig) -> tuple[KeptGroup, ...]:
    return tuple(
        KeptGroup(
            "latent" if isinstance(group.entry, LatentEntry) else "heads",
            _entry(group.entry),
            _seen(group.retention),
            len(group.layer_ids),
            group.elements_per_token * attention.kv_dtype.itemsize,
        )
        for group in attention.kv_layout.groups
    )


def kept_states(entries: tuple[StateEntry, ...] | None) -> KeptStates | None:
    """None where there are none, or none are known."""
    if not entries:
        return None
    return KeptStates(len(entries), sum(entry.bytes_per_slot for entry in entries))


def _entry(entry: HeadsEntry | LatentEntry) -> str:
    match entry:
        case HeadsEntry(num_heads, head_dim, v_head_dim):
            return f"{num_heads} x ({head_dim} + {v_head_dim})"
        case LatentEntry(latent_dim, rope_dim):
            return f"{latent_dim} + {rope_dim}"


def _seen(retention: AccountRetention) -> str:
    match retention:
        case EveryToken():
            return "every token"
        case LastTokens(num_tokens):
            return f"the last {num_tokens}"
        case CurrentChunk(num_tokens):
            return f"its chunk of {num_tokens}"
        case FixedLength(max_tokens):
            return f"up to {max_tokens} of an encoder"
