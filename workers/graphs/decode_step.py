"""The two ends of a decode step that lives in static tensors: what a captured graph needs.

A step's rows are one small int32 matrix in host memory that the device reads itself; begin spreads
it, end turns logits into tokens and writes them back there. Knows no graph, no model and no plan.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.speculation.step_trees import sees_ancestors

SEQ_LENS_FIELD = 1
FIRST_CACHE_FIELD = 3
"""Rows of the host's matrix: slot, sequence length, input id, then a cache index in each account of
KV memory. A further row's first element is the step's number."""


@dataclass(frozen=True, slots=True)
class StepRing:
    """Slots of host memory that steps take by turns, and which one it is, which the device knows.

    rows: int32 (slots, num_fields + 1, max_rows) and sampled: int32 (slots, max_rows + 1) lie in
    the host's memory, page-locked for CUDA, which reads and writes it where it is; sampled ends
    with the number of the step that it answers. next_slot: int32 (1,), current: int32 (2,) slot and
    number of the step under way; both on the device. begin reads next_slot and sets current, end
    reads current and sets next_slot: no launch reads what it writes.
    """

    rows: torch.Tensor
    sampled: torch.Tensor
    next_slot: torch.Tensor
    current: torch.Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, max_rows: int, device: torch.device, num_accounts: int
    ) -> "StepRing":
        is_pinned = device.type == "cuda"
        rows_shape = (num_slots, FIRST_CACHE_FIELD + num_accounts + 1, max_rows)
        return cls(
            torch.zeros(rows_shape, dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros((num_slots, max_rows + 1), dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )

    @property
    def num_slots(self) -> int:
        return self.rows.shape[0]

    @property
    def num_fields(self) -> int:
        return self.rows.shape[1] - 1


@dataclass(frozen=True, slots=True)
class StepRows:
    """Static device tensors of a step's rows, padding included. int64 (n,), lengths int32.

    bounded_cache_locs: out_cache_loc of each account beside account 0.
    """

    slots: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    bounded_cache_locs: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device, num_accounts: int) -> "StepRows":
        slots, input_ids, positions, *cache_locs = torch.zeros(
            (3 + num_accounts, max_rows), dtype=torch.int64, device=device
        )
        seq_lens, prefix_lens = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        own, *bounded = cache_locs
        return cls(slots, input_ids, positions, own, seq_lens, prefix_lens, tuple(bounded))

    def first(self, num_rows: int) -> "StepRows":
        return StepRows(
            self.slots[:num_rows],
            self.input_ids[:num_rows],
            self.positions[:num_rows],
            self.out_cache_loc[:num_rows],
            self.seq_lens[:num_rows],
            self.prefix_lens[:num_rows],
            tuple(locs[:num_rows] for locs in self.bounded_cache_locs),
        )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Static device tensors of rows of several tokens each: slots int64, seq_lens and prefix_lens
    int32 (n,). The prefix is the first token's, the length the last one's."""

    slots: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> "TokenRows":
        seq_lens, prefix_lens = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        return cls(torch.zeros(max_rows, dtype=torch.int64, device=device), seq_lens, prefix_lens)

    def first(self, num_rows: int) -> "TokenRows":
        return TokenRows(
            self.slots[:num_rows], self.seq_lens[:num_rows], self.prefix_lens[:num_rows]
        )


class DecodeStepKernels(Protocol):
    """Launches only; never waits for the device."""

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        """Fill rows (n each) from the ring's next slot, which becomes the current one.

        A negative input id means what the slot sampled last. Also writes each row's cache indices
        to the accounts' tables at its position.
        """

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        """Behind begin, of tokens that are rows of as many each: fill rows.

        named: int64 (num tokens,), what stands for the input id that begin found, but where it is
        negative; None for none.
        """

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        """Of trees of num_tokens tokens each: fill cells, bool (n * num_tokens,), as Tree.mask.

        parents: int64 (n,), which token of all trees each stands behind, a root itself; of any
        depth, chains included.
        """

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        """Greedy tokens of the model's local_logits, n rows, the lowest id among equals, to the
        ring's current slot. The one after it is next.

        A row with a NaN yields NAN_TOKEN. The tokens also become what the slots (n,) sampled last.
        """


@dataclass(frozen=True, slots=True)
class TorchStepKernels:
    """In plain torch, on any device: the reference of faster ones. Waits for the device.

    tables: of each account int32 (slots, positions), last_token_ids int64 (slots,): written to.
    """

    tables: tuple[torch.Tensor, ...]
    last_token_ids: torch.Tensor

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        host_rows = ring.rows[int(ring.next_slot)].to(rows.slots.device)
        ring.current[0] = ring.next_slot[0]
        ring.current[1] = host_rows[ring.num_fields, 0]
        fields = host_rows[: ring.num_fields, : rows.slots.shape[0]].long()
        slots, seq_lens, input_ids, *cache_indices = fields
        rows.seq_lens.copy_(seq_lens)
        rows.slots.copy_(slots)
        rows.positions.copy_((seq_lens - 1).clamp_(min=0))
        rows.prefix_lens.copy_(rows.positions)
        last = self.last_token_ids.index_select(0, slots)
        rows.input_ids.copy_(torch.where(input_ids < 0, last, input_ids))
        all_locs = rows.out_cache_loc, *rows.bounded_cache_locs
        for table, locs, found in zip(self.tables, all_locs, cache_indices, strict=True):
            locs.copy_(found)
            table[slots, rows.positions] = found.int()

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        if named is not None:
            tokens.input_ids.copy_(torch.where(named >= 0, named, tokens.input_ids))
        num_rows = len(rows.slots)
        rows.slots.copy_(tokens.slots.view(num_rows, -1)[:, 0])
        rows.seq_lens.copy_(tokens.seq_lens.view(num_rows, -1)[:, -1])
        rows.prefix_lens.copy_(tokens.prefix_lens.view(num_rows, -1)[:, 0])

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        firsts = torch.arange(len(parents), device=parents.device) // num_tokens * num_tokens
        cells.copy_(sees_ancestors(parents, firsts, num_tokens).view(-1))

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        current, number = ring.current.tolist()
        row_max, token_ids = logits.max(dim=-1)
        has_nan = row_max.isnan()
        ring.sampled[current, : slots.shape[0]] = token_ids.masked_fill(has_nan, -1).int().cpu()
        ring.sampled[current, -1] = number
        ring.next_slot.fill_((current + 1) % ring.num_slots)
        self.last_token_ids.index_copy_(0, slots, token_ids.masked_fill(has_nan, 0))
