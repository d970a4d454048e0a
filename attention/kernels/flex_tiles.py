"""A step's new tokens in tiles: what FlexAttention's block mask counts its queries by.

A row's pairs of a new token and a query head of one KV head are one matrix, cut into tiles of equal
height, so that no tile has tokens of two rows and any number of query heads shares a KV head. Which
tokens a tile has follows from the host's copies of lengths. Knows no pool and no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TILE_ROWS = (16, 128)
"""Heights of tiles: for decode steps and a few drafts, and for everything else."""
_MIN_TILES = 2
_MIN_PAIRS = 128
"""torch compiles sizes of 0 and 1 anew, and fewer pairs than these, for which it has another
kernel; tiles without tokens stand for what is missing."""


def min_tiles(tile_rows: int) -> int:
    return max(_MIN_TILES, -(-_MIN_PAIRS // tile_rows))


@dataclass(frozen=True, slots=True)
class TileShape:
    """rows: pairs of a token and a head. group: query heads of a KV head. The last rows are of no
    pair where group does not divide them."""

    rows: int
    group: int

    @property
    def tokens(self) -> int:
        return self.rows // self.group

    @classmethod
    def of_step(cls, group: int, max_new_tokens: int) -> TileShape:
        """The lowest tile that has all of a row's new tokens, else the highest."""
        fits = (rows for rows in TILE_ROWS if rows >= group * max_new_tokens)
        return cls(next(fits, TILE_ROWS[-1]), group)


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of a step, row after row, on its device.

    rows: int64 (num_tiles,), of the batch. tokens: int64 (num_tiles, shape.tokens), among the
    step's new tokens, any of them where there is none. new: int64, alike, its place among its row's
    new tokens. is_token: bool, alike. places: int64 (num_tokens,), where each new token stands in
    the flattened tiles.
    """

    shape: TileShape
    rows: torch.Tensor
    tokens: torch.Tensor
    new: torch.Tensor
    is_token: torch.Tensor
    places: torch.Tensor

    def cut(self, q: torch.Tensor) -> torch.Tensor:
        """(num_tokens, q_heads, n) -> (1, kv_heads, num_tiles * shape.rows, n)."""
        shape, dim = self.shape, q.shape[-1]
        by_head = q[self.tokens].view(*self.tokens.shape, -1, shape.group, dim)
        pairs = by_head.permute(2, 0, 1, 3, 4)
        flat = pairs.flatten(2, 3)
        spare = shape.rows - shape.tokens * shape.group
        padded = torch.nn.functional.pad(flat, (0, 0, 0, spare))
        # Strides that follow from the sizes: torch compiles anew for others.
        return padded.reshape(1, len(flat), -1, dim).contiguous()

    def join(self, tiles: torch.Tensor) -> torch.Tensor:
        """(1, kv_heads, num_tiles * shape.rows, n) -> (num_tokens, q_heads, n)."""
        shape = self.shape
        heads, dim = tiles.shape[1], tiles.shape[-1]
        by_tile = tiles[0].view(heads, -1, shape.rows, dim)
        used = by_tile[:, :, : shape.tokens * shape.group]
        pairs = used.reshape(heads, -1, shape.tokens, shape.group, dim).permute(1, 2, 0, 3, 4)
        return pairs.flatten(0, 1).flatten(1, 2)[self.places]

    def per_pair(self, values: torch.Tensor) -> torch.Tensor:
        """(n, num_tiles, shape.tokens) -> int32 (n, num_tiles * shape.rows); 0 for no pair."""
        pairs = values.to(torch.int32).repeat_interleave(self.shape.group, dim=2)
        spare = self.shape.rows - pairs.shape[2]
        return torch.nn.functional.pad(pairs, (0, spare)).flatten(1)


def cut_step(group: int, extend_seq_lens: npt.NDArray[np.int32], device: torch.device) -> StepTiles:
    """extend_seq_lens: int32 (bs,), the host's; at least one new token in all."""
    num_new = extend_seq_lens.astype(np.int64)
    shape = TileShape.of_step(group, int(num_new.max()))
    tiles_of_row = -(-num_new // shape.tokens)
    rows = np.repeat(np.arange(len(num_new)), tiles_of_row)
    first = (np.arange(len(rows)) - np.repeat(_starts(tiles_of_row), tiles_of_row)) * shape.tokens
    missing = max(0, min_tiles(shape.rows) - len(rows))
    rows = np.concatenate([rows, np.zeros(missing, np.int64)])
    first = np.concatenate([first, np.full(missing, num_new[0])])
    new = first[:, None] + np.arange(shape.tokens)
    is_token = new < num_new[rows][:, None]
    tokens = np.where(is_token, _starts(num_new)[rows][:, None] + new, 0)
    places = np.flatnonzero(is_token)
    parts = (rows, tokens, new, is_token.astype(np.int64), places)
    sizes = [part.size for part in parts]
    whole = upload(np.concatenate([part.reshape(-1) for part in parts]), device)
    flat = torch.split(whole, sizes)
    in_tiles = [part.view(-1, shape.tokens) for part in flat[1:4]]
    return StepTiles(shape, flat[0], in_tiles[0], in_tiles[1], in_tiles[2].bool(), flat[4])


def upload(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it."""
    on_host = torch.from_numpy(values)
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts: npt.NDArray[np.int64] = np.cumsum(lengths) - lengths
    return starts
