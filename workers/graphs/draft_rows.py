"""The rows of a graph of drafts in static tensors: as the host stages them, and as each pass has
them, which is known before the first one. Knows no drafter and no graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

SLOTS, POSITIONS, IS_ROW, IDS, FIRST_PLACES = range(5)
"""Rows of the staged matrix; from the last on the cache index of each of a row's tokens."""


_ROWS_PER_LINE = 4
"""Rows of a pass begin at multiples of 16 bytes: a kernel is then the same for every pass."""


@dataclass(frozen=True, slots=True)
class PassTensors:
    """ids: int64 (rows,), what the first pass reads. Of each pass, (passes, rows): positions and
    places, int64, of the token that it reads; prefix_lens and seq_lens, int32, without that token
    and with it, both 0 for rows that pad a graph."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)


SpreadRows = Callable[[torch.Tensor, PassTensors, torch.Tensor], None]
"""Fill all passes from what is staged, int64 (4 + passes or more, rows). The table, int32 (slots,
positions), learns where the passes write. Launches only."""


def spread_rows(staged: torch.Tensor, passes: PassTensors, table: torch.Tensor) -> None:
    """SpreadRows in plain torch, on any device: the reference of a faster one."""
    slots, positions, is_row = staged[SLOTS], staged[POSITIONS], staged[IS_ROW]
    columns = torch.arange(len(passes), device=staged.device).unsqueeze(1)
    places = staged[FIRST_PLACES : FIRST_PLACES + len(passes)]
    own = positions + columns * is_row
    passes.ids.copy_(staged[IDS])
    passes.positions.copy_(own)
    passes.places.copy_(places)
    passes.prefix_lens.copy_(own)
    passes.seq_lens.copy_(own + is_row)
    table[slots.expand_as(places), positions + columns] = places.int()


@dataclass(frozen=True, slots=True)
class StaticRows:
    """What graphs read and write, of up to max_rows rows of up to max_tokens tokens.

    staged: int64 ((4 + max_tokens) * max_rows,), as a step fills it in by one copy, see of_rows.
    all_passes: of max_tokens passes and max_rows rows or more. ones: int32 (max_rows,). drafts:
    int64 (max_rows, max_tokens).
    """

    staged: torch.Tensor
    all_passes: PassTensors
    ones: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, max_tokens: int, device: torch.device) -> "StaticRows":
        num_fields = FIRST_PLACES + max_tokens
        shape = max_tokens, -(-max_rows // _ROWS_PER_LINE) * _ROWS_PER_LINE
        positions, places = torch.zeros((2, *shape), dtype=torch.int64, device=device)
        prefix_lens, seq_lens = torch.zeros((2, *shape), dtype=torch.int32, device=device)
        ids = torch.zeros_like(positions[0])
        return cls(
            torch.zeros(num_fields * max_rows, dtype=torch.int64, device=device),
            PassTensors(ids, positions, places, prefix_lens, seq_lens),
            torch.ones(max_rows, dtype=torch.int32, device=device),
            torch.zeros((max_rows, max_tokens), dtype=torch.int64, device=device),
        )

    def of_rows(self, num_rows: int) -> torch.Tensor:
        """What is staged of so many rows, a view (4 + tokens of a row, num_rows)."""
        num_fields = len(self.staged) // num_rows
        return self.staged[: num_fields * num_rows].view(num_fields, num_rows)

    def passes(self, num_passes: int, num_rows: int) -> PassTensors:
        """The first of them, of so many rows: views."""
        own = self.all_passes
        each = own.positions, own.places, own.prefix_lens, own.seq_lens
        return PassTensors(own.ids[:num_rows], *(one[:num_passes, :num_rows] for one in each))


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """What the rows of a step have verified and drawn, on the device or where it reads. drafts:
    int64 (bs, n), contiguous. sampled: int32 or int64 (bs, n + 1), behind the token before the
    drafts and behind each of them; of trees those that hold first, and as many columns as may.
    run_lens: int64 (bs,), how many samples of each row hold; None where the drafts say it, up to
    the first wrong one."""

    drafts: torch.Tensor
    sampled: torch.Tensor
    run_lens: torch.Tensor | None = None


GoOn = Callable[[torch.Tensor, int, DrawnRows, torch.Tensor], None]
"""Rows that go on from those of the step before, true lengths and last tokens in place of what is
staged, int64 (4 + passes, rows), of the first so many of them: for POSITIONS, where that step began
in the table; for IDS, which of its rows each is; and from FIRST_PLACES on the cache indices of as
many positions behind all that it brought, which the table, int32 (slots, positions), learns. What
is no number becomes token 0. Launches only."""


def go_on(staged: torch.Tensor, num_rows: int, drawn: DrawnRows, table: torch.Tensor) -> None:
    """GoOn in plain torch, on any device: the reference of a faster one."""
    own = staged[:, :num_rows]
    slots, before, rows, places = own[SLOTS], own[POSITIONS], own[IDS], own[FIRST_PLACES:]
    run_lens = _run_lens(drawn)[rows]
    last_ids = drawn.sampled.long()[rows, run_lens - 1]
    columns = torch.arange(len(places), device=staged.device).unsqueeze(1)
    table[slots, before + 1 + drawn.drafts.shape[1] + columns] = places.int()
    before += run_lens
    places.copy_(table[slots, before + columns])
    rows.copy_(last_ids.clamp(min=0))


def _run_lens(drawn: DrawnRows) -> torch.Tensor:
    if drawn.run_lens is not None:
        return drawn.run_lens
    is_right = drawn.sampled[:, :-1] == drawn.drafts
    return 1 + is_right.long().cumprod(dim=1).sum(dim=1)


class RowKernels(NamedTuple):
    """What fills static rows, on one kind of device."""

    spread: SpreadRows
    go_on: GoOn


TORCH_ROW_KERNELS = RowKernels(spread_rows, go_on)
