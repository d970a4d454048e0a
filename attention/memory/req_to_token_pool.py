"""First level of KV memory: request slot and token position to cache index.

Knows neither who owns a slot nor which pages are free: the scheduler's accounting decides, the
model runner writes, attention backends read.
"""

from copy import copy
from typing import Self

import torch


class ReqToTokenPool:
    """tables: of each account int32 (max_running_requests, max_context_len) on the device;
    req_to_token is account 0's. Where a model has an encoder, the last one is of its account, with
    encoder_width columns; own_tables are the others.

    req_to_token[slot, position] is the cache index (page_id * page_size + offset) of that token's
    K and V. Entries past a request's length are stale, never trusted, and always a valid index:
    the table starts as zeros, which is the dummy page.
    """

    def __init__(
        self,
        max_running_requests: int,
        max_context_len: int,
        device: torch.device,
        num_accounts: int = 1,
        encoder_width: int = 0,
    ) -> None:
        """num_accounts: of requests' own tokens. encoder_width: as many tokens as a request's
        encoder gives at most, in whole pages; 0 where there is none."""
        if max_running_requests < 1 or max_context_len < 1:
            raise ValueError(
                f"max_running_requests={max_running_requests} and max_context_len={max_context_len}"
                " must be positive"
            )
        self.max_running_requests = max_running_requests
        self.max_context_len = max_context_len
        shape = max_running_requests, max_context_len
        shapes = [shape] * num_accounts
        if encoder_width:
            shapes.append((max_running_requests, encoder_width))
        self.tables = tuple(torch.zeros(one, dtype=torch.int32, device=device) for one in shapes)
        self.own_tables = self.tables[:num_accounts]
        self.req_to_token = self.tables[0]

    def without_first(self, num_positions: int) -> Self:
        """A pool that reads and writes the same memory and counts positions from num_positions on:
        of requests whose first tokens somebody has nothing to keep of."""
        view = copy(self)
        view.max_context_len = self.max_context_len - num_positions
        view.own_tables = tuple(table[:, num_positions:] for table in self.own_tables)
        view.tables = view.own_tables + self.tables[len(self.own_tables) :]
        view.req_to_token = view.tables[0]
        return view

    @property
    def num_bytes(self) -> int:
        return sum(table.numel() * table.itemsize for table in self.tables)

    def write(
        self, slots: torch.Tensor, start: int, cache_indices: torch.Tensor, account: int = 0
    ) -> None:
        """Set positions start .. start + n of slots int64 (m,) to cache_indices int32 (n,), the
        same for each; both on the pool's device. One launch."""
        num_slots, n = slots.shape[0], cache_indices.shape[0]
        columns = self.tables[account][:, start : start + n]
        columns.index_copy_(0, slots, cache_indices.expand(num_slots, n))
