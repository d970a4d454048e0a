"""A drafter that remembers of every token what it made of it, at the target's cache indices.

What it is asked for before and after there is KV memory. A variation is a file of its own.
"""

from typing import Protocol

import torch

from attention.config import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from workers.speculation.device_drafter import DeviceDrafter, DeviceTreeDrafter
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps


class PlacedDrafter(Protocol):
    """With memory of its own."""

    def proposer(self, history: TokenHistory, taps: StepTaps) -> Proposer:
        """taps: filled by every pass of the target."""
        ...

    def device_drafter(self) -> DeviceDrafter:
        """The same on a device that the host runs ahead of: chains."""
        ...

    def tree_drafter(self) -> DeviceTreeDrafter:
        """As device_drafter, of trees."""
        ...

    def prepare_while_idle(self) -> bool:
        """As CausalLM.prepare_while_idle."""
        ...

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        """Zero what cache_indices int64 (n,) hold."""
        ...


class PagedDrafter(Protocol):
    """Loaded, and checked against its target."""

    @property
    def taps_final_states(self) -> bool:
        """Whether it reads the target's final states, of every token, in place of taps."""
        ...

    @property
    def num_taps(self) -> int:
        """How many states of each token the target hands over to it."""
        ...

    def num_bytes_a_token(self) -> int:
        """Of KV memory, on this rank."""
        ...

    def place(
        self, target: AttentionConfig, num_pages: int, req_to_token_pool: ReqToTokenPool
    ) -> PlacedDrafter:
        """target: whose pages these are. num_pages: of it, the reserved one counted."""
        ...
