"""The two ends of a decode step that lives in static tensors: what a captured graph needs.

A step's rows reach the device as one small int32 matrix; begin spreads it, end turns logits into
tokens. Knows no graph, no model and no plan.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

HOST_ROW_FIELDS = 4
"""Rows of the host's matrix: slot, sequence length, input id, cache index."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Static device tensors of a step's rows, padding included. int64 (n,), prefix_lens int32."""

    slots: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    prefix_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> "StepRows":
        slots, input_ids, positions, out_cache_loc = torch.zeros(
            (4, max_rows), dtype=torch.int64, device=device
        )
        prefix_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        return cls(slots, input_ids, positions, out_cache_loc, prefix_lens)

    def first(self, num_rows: int) -> "StepRows":
        return StepRows(
            self.slots[:num_rows],
            self.input_ids[:num_rows],
            self.positions[:num_rows],
            self.out_cache_loc[:num_rows],
            self.prefix_lens[:num_rows],
        )


class DecodeStepKernels(Protocol):
    """Launches only; never waits for the device."""

    def begin(self, host_rows: torch.Tensor, rows: StepRows) -> None:
        """Fill rows (n each) from host_rows int32 (HOST_ROW_FIELDS, at least n) on the device.

        A negative input id means what the slot sampled last. Also writes each row's cache index
        to req_to_token at its position.
        """

    def end(self, logits: torch.Tensor, slots: torch.Tensor, sampled: torch.Tensor) -> None:
        """Greedy tokens of logits (n, vocab), the lowest id among equals, to sampled int32 (n,).

        A row with a NaN yields NAN_TOKEN. The tokens also become what the slots (n,) sampled last.
        """


@dataclass(frozen=True, slots=True)
class TorchStepKernels:
    """In plain torch, on any device: the reference of faster ones.

    req_to_token int32 (slots, positions), last_token_ids int64 (slots,): written to.
    """

    req_to_token: torch.Tensor
    last_token_ids: torch.Tensor

    def begin(self, host_rows: torch.Tensor, rows: StepRows) -> None:
        slots, seq_lens, input_ids, cache_indices = host_rows[:, : rows.slots.shape[0]].long()
        rows.slots.copy_(slots)
        rows.positions.copy_((seq_lens - 1).clamp_(min=0))
        rows.prefix_lens.copy_(rows.positions)
        rows.out_cache_loc.copy_(cache_indices)
        last = self.last_token_ids.index_select(0, slots)
        rows.input_ids.copy_(torch.where(input_ids < 0, last, input_ids))
        self.req_to_token[slots, rows.positions] = cache_indices.int()

    def end(self, logits: torch.Tensor, slots: torch.Tensor, sampled: torch.Tensor) -> None:
        row_max, token_ids = logits.max(dim=-1)
        has_nan = row_max.isnan()
        sampled.copy_(token_ids.masked_fill(has_nan, -1))
        self.last_token_ids.index_copy_(0, slots, token_ids.masked_fill(has_nan, 0))
