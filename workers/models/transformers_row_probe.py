"""What a model of transformers keeps in its cache, and whether that is all that it needs.

A few tokens are run whole without a cache, and again in chunks and in company with one: where these
differ, the model cannot be served row by row. Nothing is read from a config but its window.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attention import AttentionHeads
from workers.errors import ModelLoadError
from workers.models.transformers_row_body import RowBody
from workers.models.transformers_row_cache import CachePlace

# New tokens of each call, on top of those before.
_CHUNKS = (5, 4, 1, 3, 1)
_NUM_TOKENS = sum(_CHUNKS)
_ONE_BY_ONE = (_CHUNKS[0], *[1] * (_NUM_TOKENS - _CHUNKS[0]))
_SMALL_WINDOW = 3


class KeptInMemory:
    """Keys and values of rows, as they come. Refuses what no pool could keep.

    heads: by place, in the order in which a pass asks for them.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._kept: dict[CachePlace, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: set[CachePlace] = set()
        self.heads: dict[CachePlace, AttentionHeads] = {}
        self._num_new = 0

    def begin(self, num_new: int) -> None:
        """A pass of so many new tokens a row. Those of an earlier one were all kept."""
        if self._seen != set(self._kept):
            raise ModelLoadError("keeps keys and values in some passes only")
        self._seen.clear()
        self._num_new = num_new

    def exchange(
        self, place: CachePlace, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if place in self._seen:
            raise ModelLoadError(f"keeps keys and values of layer {place.layer_idx} twice")
        self._seen.add(place)
        for new in (k, v):
            if (new.shape[0], new.shape[2:-1]) != (self._num_rows, (self._num_new,)):
                raise ModelLoadError(f"keeps what is not of its tokens in layer {place.layer_idx}")
        if k.shape[1] != v.shape[1]:
            raise ModelLoadError(f"has unlike numbers of K and V heads in layer {place.layer_idx}")
        self.heads[place] = AttentionHeads(k.shape[1], k.shape[1], k.shape[3], v.shape[3])
        if place in self._kept:
            before = self._kept[place]
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        self._kept[place] = k.contiguous(), v.contiguous()
        return self._kept[place]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """heads: of what the pool keeps, by place. continues_many: whether several tokens on top of
    others can be computed in one call."""

    heads: Mapping[CachePlace, AttentionHeads]
    continues_many: bool


def probe_rows(body: RowBody, config: Any, rows: torch.Tensor) -> RowFacts:
    """config: of the text. rows: int64 (2, n), tokens that differ, as random_rows gives them.

    Raises ModelLoadError, which says what the model does, for one that keeps other things than keys
    and values in its cache, whose tokens depend on more than those before, or that does not count
    positions from 0.
    """
    if not body.takes_cache:
        raise ModelLoadError("takes no cache")
    alone = rows[:1]
    want = body.run_whole(alone)
    _check_positions(body, alone, want)
    _check_window(body, config, alone, want)
    measure = _Measure(want, _in_chunks(body, alone, _CHUNKS, forgets=True)[0])
    got, kept = _in_chunks(body, alone, _CHUNKS)
    continues_many = measure.is_near(got)
    if not continues_many and not measure.is_near(_in_chunks(body, alone, _ONE_BY_ONE)[0]):
        raise ModelLoadError("continues from its cache unlike the whole text")
    in_company = _in_chunks(body, rows, (_CHUNKS[0], 1))[0]
    if not measure.is_near(in_company[:1]):
        raise ModelLoadError("has rows of a batch depend on each other")
    if not kept.heads:
        raise ModelLoadError("keeps nothing in its cache")
    return RowFacts(kept.heads, continues_many)


def random_rows(config: Any, device: torch.device) -> torch.Tensor:
    """int64 (2, _NUM_TOKENS) of ordinary tokens: none that the config gives a meaning."""
    special = {
        value
        for name, value in vars(config).items()
        if name.endswith(("token_id", "padding_idx")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(config.vocab_size, 1024)) if token not in special]
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(0, len(ordinary), (2, _NUM_TOKENS), generator=generator)
    return torch.tensor(ordinary)[picked].to(device)


def _in_chunks(
    body: RowBody, rows: torch.Tensor, chunks: Sequence[int], forgets: bool = False
) -> tuple[torch.Tensor, KeptInMemory]:
    """Final states of the chunks' tokens, each on top of those before, or of none."""
    kept, outputs, num_cached = KeptInMemory(len(rows)), [], 0
    for tokens in torch.split(rows[:, : sum(chunks)], list(chunks), dim=1):
        if forgets:
            kept, num_cached = KeptInMemory(len(rows)), 0
        kept.begin(tokens.shape[1])
        outputs.append(body.run(tokens, num_cached, kept))
        num_cached += tokens.shape[1]
    return torch.cat(outputs, dim=1), kept


class _Measure:
    """How near is near: far nearer than what comes out where earlier tokens are forgotten."""

    def __init__(self, want: torch.Tensor, forgetful: torch.Tensor) -> None:
        self._want = want.float()
        of_effect, rounding = (1e-3, 1e-4) if want.dtype == torch.float32 else (0.1, 2e-2)
        effect = (forgetful.float() - self._want).norm(dim=-1)
        self._allowed = of_effect * effect + rounding * self._want.norm(dim=-1)

    def is_near(self, got: torch.Tensor) -> bool:
        """Of the first tokens."""
        num_tokens = got.shape[1]
        away = (got.float() - self._want[:, :num_tokens]).norm(dim=-1)
        return bool((away <= self._allowed[:, :num_tokens]).all())


def _check_positions(body: RowBody, rows: torch.Tensor, want: torch.Tensor) -> None:
    """generate() gives a model positions from 0 where it takes any."""
    if body.takes_positions:
        given = body.run_whole(rows, counts_positions=False)
        if not _Measure(want, want).is_near(given):
            raise ModelLoadError("does not count positions from 0")


def _check_window(body: RowBody, config: Any, rows: torch.Tensor, want: torch.Tensor) -> None:
    """The cache of generate() cuts what is out of the window. Keys are all kept here, so that the
    model's own mask has to leave them out."""
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelLoadError("attends in chunks")
    if getattr(config, "sliding_window", None) is None:
        return
    with _window(config, _SMALL_WINDOW):
        windowed = body.run_whole(rows)
    if _Measure(want, want).is_near(windowed):
        raise ModelLoadError("has a mask that does not show its sliding window")


@contextmanager
def _window(config: Any, window: int) -> Iterator[None]:
    own = config.sliding_window
    config.sliding_window = window
    try:
        yield
    finally:
        config.sliding_window = own
