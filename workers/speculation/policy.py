"""How many drafts a step verifies. On the scheduler's side: plain numbers, no tensor, no device."""

from typing import NamedTuple, Protocol

from workers.kv_cache.radix_node import IntArray


class DecodeShape(NamedTuple):
    """A step of decode rows: rows, drafts of each, 0 for a plain one, and keys in the cache, of all
    rows."""

    num_rows: int
    num_drafts: int
    num_keys: int = 0


class DraftPolicy(Protocol):
    """Told of every run and every step, in order; asked for every step."""

    def choose(self, most: IntArray) -> int:
        """Most drafts of a row in the next step; most: int32 (n,), what each row may have."""
        ...

    def observe_run(self, num_drafts: int, num_accepted: int) -> None:
        """A row was to verify so many drafts, at least one, and so many were made and right."""
        ...

    def observe_step(self, shape: DecodeShape, seconds: float, gap_s: float = 0.0) -> None:
        """A step of nothing but decode rows took so long, its drafts' making included. gap_s: what
        there was between the step before it and this one: a wait for the host, or a head that
        reads."""
        ...


class FixedLength:
    """As many as there may be."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens

    def choose(self, most: IntArray) -> int:
        return self._max_draft_tokens

    def observe_run(self, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learnt."""

    def observe_step(self, shape: DecodeShape, seconds: float, gap_s: float = 0.0) -> None:
        """Nothing is learnt."""
