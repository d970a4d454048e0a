"""What a model keeps of its tokens, declared: groups of layers that keep alike, and for how long.

A CacheGroup says what its layers keep of a token (its entry) and which tokens they can still see
(its retention). Groups of one retention share an account: one page table, one stock of pages. A
plain decoder has one group and one account. Keeps no tensor, knows no page and no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Position = TypeVar("Position", int, npt.NDArray[np.int64], torch.Tensor)
"""One position of a request, or several: int64, of any shape."""


@dataclass(frozen=True, slots=True)
class HeadsEntry:
    """K and V: num_heads vectors of head_dim and of v_head_dim elements a token."""

    num_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class LatentEntry:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed vector that every
    head's K and V follow from, and one rotated key part that all heads share."""

    latent_dim: int
    rope_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.latent_dim + self.rope_dim


Entry = HeadsEntry | LatentEntry


@dataclass(frozen=True, slots=True)
class EveryToken:
    """A token stays visible as long as its request lives."""

    @property
    def name(self) -> str:
        return "every_token"

    def first_visible(self, position: Position) -> Position:
        """The first position that the query at position, or any later one, may see."""
        return position * 0


@dataclass(frozen=True, slots=True)
class LastTokens:
    """A query sees the num_tokens most recent tokens, its own included."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a window holds at least one token, got {self.num_tokens}")

    @property
    def name(self) -> str:
        return f"window_{self.num_tokens}"

    def first_visible(self, position: Position) -> Position:
        first: Position = (position - self.num_tokens + 1) * (position >= self.num_tokens)
        return first


@dataclass(frozen=True, slots=True)
class CurrentChunk:
    """A query sees the tokens since its chunk of num_tokens positions began."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a chunk holds at least one token, got {self.num_tokens}")

    @property
    def name(self) -> str:
        return f"chunk_{self.num_tokens}"

    def first_visible(self, position: Position) -> Position:
        return position - position % self.num_tokens


BoundedRetention = LastTokens | CurrentChunk
Retention = EveryToken | BoundedRetention


@dataclass(frozen=True, slots=True)
class FixedLength:
    """What an encoder made of a request's input, at most max_tokens tokens: written once, before
    the request's first token, and seen whole by every query. No token is ever added."""

    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"an encoder gives at least one token, got {self.max_tokens}")

    @property
    def name(self) -> str:
        return "encoder"


AccountRetention = Retention | FixedLength
"""Of a request's own tokens, or of its encoder's. Its name is what metrics call its account."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same of a token, for as long. layer_ids: ascending."""

    name: str
    layer_ids: tuple[int, ...]
    entry: Entry
    retention: AccountRetention

    def __post_init__(self) -> None:
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"group {self.name!r} needs ascending layers, got {self.layer_ids}")

    @property
    def elements_per_token(self) -> int:
        """Of all its layers."""
        return len(self.layer_ids) * self.entry.elements_per_token


@dataclass(frozen=True, slots=True)
class Account:
    """Groups whose tokens are kept equally long, so that one list of pages serves all of them."""

    retention: AccountRetention
    groups: tuple[CacheGroup, ...]


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model. Raises ValueError where a layer or a name stands in two of them."""

    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a layout needs at least one group")
        _refuse_repeated("layer", (layer for group in self.groups for layer in group.layer_ids))
        _refuse_repeated("group", (group.name for group in self.groups))

    @cached_property
    def accounts(self) -> tuple[Account, ...]:
        """By retention; the one that keeps every token first, then those that let go of some as
        they are declared, then the encoder's."""
        kinds = dict.fromkeys(group.retention for group in self.groups)
        ordered = sorted(kinds, key=_rank)
        return tuple(
            Account(kind, tuple(group for group in self.groups if group.retention == kind))
            for kind in ordered
        )


def _rank(retention: AccountRetention) -> int:
    match retention:
        case EveryToken():
            return 0
        case LastTokens() | CurrentChunk():
            return 1
        case FixedLength():
            return 2


def _refuse_repeated(what: str, values: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} stands in the layout twice")
        seen.add(value)
