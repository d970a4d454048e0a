"""What a step's tiles see of the paged pool, as FlexAttention's block mask says it.

Masks are data: for each pair of a token and a head, places of its row that it sees, in two
intervals or by cells of a tree. Windows, chunks and shared prefixes move the intervals, so that one
compiled kernel has all of them. A tile lists the pages in which any of its tokens may see a key, by
their numbers in the pool; a table says at which place of its row a page of the pool stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.forward_batch import ForwardBatch
from attention.kernels.flex_tiles import StepTiles
from attention.kernels.flex_tree import TreeCells
from attention.memory.layout import CurrentChunk, LastTokens, Retention
from attention.visibility import Causal, Everything, Items, Tree

MIN_PAGES = 2  # torch compiles sizes of 0 and 1 anew


@dataclass(frozen=True, slots=True)
class SeenPages:
    """Of a step's tiles, for layers of one account, retention and group of heads.

    num_pages: int32 (1, 1, num_tiles). pages: int32 (1, 1, num_tiles, most), numbers in the pool.
    pairs: int32 (5, num_tiles * tile rows), of each pair its slot and, unless there are cells, the
    first place and the end of both intervals that it sees; with cells, the first place that it
    sees, the end of the cached prefix, where its cells begin, and how many there are.
    cells: bool (n,), of trees.
    """

    num_pages: torch.Tensor
    pages: torch.Tensor
    pairs: torch.Tensor
    cells: torch.Tensor | None


class AccountPages:
    """Where the pages of one account's rows stand, and what of them a step's tiles see.

    table: int32 (slots, max_context_len), cache indices of the account's tokens. positions: int32
    (slots, num_pages + 1), at which page of a row a page of the pool stands, -1 where no tile of
    the step lists it; the last column takes what belongs nowhere.
    """

    def __init__(self, table: torch.Tensor, num_pages: int, page_size: int) -> None:
        self._table = table
        self._num_pages = num_pages
        self._page_size = page_size
        shape = (max(len(table), MIN_PAGES), num_pages + 1)
        with torch.inference_mode():  # as all that masks read
            self.positions = torch.full(shape, -1, dtype=torch.int32, device=table.device)

    def start_step(self, forward_batch: ForwardBatch) -> None:
        """Forget what the batch's rows listed before."""
        self.positions.index_fill_(0, forward_batch.req_pool_indices, -1)

    def see(
        self,
        tiles: StepTiles,
        forward_batch: ForwardBatch,
        retention: Retention,
        cells: TreeCells | None,
    ) -> SeenPages:
        """cells: of the step, if its visibility is a tree. Waits for no device."""
        slots = forward_batch.req_pool_indices[tiles.rows]
        tokens = _TileTokens.of(tiles, forward_batch)
        bounds, hull = tokens.bounds(forward_batch.visibility, retention, cells)
        pages, num_pages = self._list(slots, hull, int(forward_batch.seq_lens_cpu.max()))
        of_pairs = torch.cat([slots.view(1, -1, 1).expand(1, *tiles.tokens.shape), bounds])
        return SeenPages(
            num_pages.to(torch.int32).view(1, 1, -1),
            pages.unsqueeze(0).unsqueeze(0),
            tiles.per_pair(of_pairs),
            None if cells is None else cells.seen(retention),
        )

    def _list(
        self, slots: torch.Tensor, hull: torch.Tensor, max_seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages int32 (num_tiles, most) and their numbers int64 (num_tiles,). hull: int64
        (2, num_tiles), the first place that a tile sees and the end."""
        size = self._page_size
        first = hull[0] // size
        num_pages = (-(-hull[1] // size) - first).clamp(min=0)
        most = max(MIN_PAGES, -(-max_seq_len // size))
        steps = torch.arange(most, device=slots.device)
        places = first.unsqueeze(1) + steps
        is_listed = steps < num_pages.unsqueeze(1)
        columns = (places * size).clamp(max=self._table.shape[1] - 1)
        pages = torch.where(is_listed, self._table[slots.unsqueeze(1), columns] // size, 0)
        columns = torch.where(is_listed, pages, self._num_pages).long()
        rows = slots.unsqueeze(1).expand_as(columns)
        self.positions.index_put_((rows, columns), places.to(torch.int32))
        return pages.to(torch.int32), num_pages


@dataclass(frozen=True, slots=True)
class _TileTokens:
    """int64 (num_tiles, tokens) each. places: in their rows. positions: as the batch has them.
    prefix, ends, num_new: of their rows, the cached tokens, all tokens, the new ones."""

    is_token: torch.Tensor
    tokens: torch.Tensor
    new: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    prefix: torch.Tensor
    ends: torch.Tensor
    num_new: torch.Tensor

    @classmethod
    def of(cls, tiles: StepTiles, forward_batch: ForwardBatch) -> _TileTokens:
        """Lengths are the device's: the host may know upper bounds only."""
        ends = forward_batch.seq_lens[tiles.rows].long().unsqueeze(1)
        num_new = forward_batch.extend_seq_lens[tiles.rows].long().unsqueeze(1)
        prefix = (ends - num_new).clamp(min=0)
        shape = tiles.tokens.shape
        return cls(
            tiles.is_token & (ends > 0),
            tiles.tokens,
            tiles.new,
            prefix + tiles.new,
            forward_batch.positions[tiles.tokens],
            prefix.expand(shape),
            ends.expand(shape),
            num_new.expand(shape),
        )

    def bounds(
        self,
        visibility: Causal | Tree | Items | Everything,
        retention: Retention,
        cells: TreeCells | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows 1 to 4 of SeenPages.pairs, int64 (4, num_tiles, tokens), and the hull of each tile,
        int64 (2, num_tiles)."""
        if isinstance(visibility, Tree):
            assert cells is not None
            first = retention.first_visible(self.positions)
            of_cells = cells.first_cells[self.tokens], self.num_new
            bounds = self._of_tokens(first, self.prefix, *of_cells)
            return bounds, self._hull(first, self.ends)
        intervals = self._of_tokens(*self._intervals(visibility, retention))
        is_there = intervals[1::2] > intervals[::2]
        starts = torch.where(is_there, intervals[::2], _FAR)
        return intervals, self._hull(starts.amin(0), intervals[1::2].amax(0))

    def _of_tokens(self, *values: torch.Tensor) -> torch.Tensor:
        """(n, num_tiles, tokens), zeros where there is no token with a key."""
        return torch.stack(values) * self.is_token

    def _hull(self, first: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        first = torch.where(self.is_token, first, _FAR).amin(1)
        return torch.stack([first, (stop * self.is_token).amax(1)])

    def _intervals(
        self, visibility: Causal | Items | Everything, retention: Retention
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """First place and end of what is shared, then of a token's own."""
        nothing, own_end = torch.zeros_like(self.places), self.places + 1
        match visibility:
            case Causal():
                return nothing, nothing, retention.first_visible(self.places), own_end
            case Everything():
                first = retention.first_visible(self.places)
                return nothing, nothing, first, self._last_visible_end(retention)
            case Items(shared_keys=shared, first_own=own):
                seen = retention.first_visible(self.positions)
                own_seen = seen - self.positions + self.places
                own_first = torch.maximum(own[self.tokens].long(), own_seen)
                return seen, shared[self.tokens].long(), own_first, own_end

    def _last_visible_end(self, retention: Retention) -> torch.Tensor:
        """Of tokens that see later ones as far as earlier ones."""
        match retention:
            case LastTokens(num_tokens):
                return torch.minimum(self.places + num_tokens, self.ends)
            case CurrentChunk(num_tokens):
                chunk_end = self.places - self.places % num_tokens + num_tokens
                return torch.minimum(chunk_end, self.ends)
            case _:
                return self.ends


_FAR = 1 << 40
