"""A model whose forward pass can be cut at every layer's attention.

What lies between two cuts takes every token by itself and launches the same kernels for any tokens
of one number: it can be recorded once. Attention, which depends on the rows' lengths, is left out.
Knows no graph.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from attention import ForwardBatch
from workers.layers.new_tensor import NewTensor
from workers.models.base import NativeCausalLM

AttentionInputs = tuple[torch.Tensor, ...]
"""What a layer's attention takes, n rows each: its queries and what else the layer keeps."""


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Of each new token. positions, cache_loc: int64 (n,), where its K and V go."""

    positions: torch.Tensor
    cache_loc: torch.Tensor


class SegmentedCausalLM(NativeCausalLM):
    """forward_rows in pieces: begin, then for each layer attend and, but for the last, advance;
    finish_rows. The residual stream (n, hidden_size) is changed in place on the way."""

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @abstractmethod
    def begin(
        self, input_ids: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> tuple[AttentionInputs, torch.Tensor]:
        """Token ids int64 (n,) -> the first layer's attention inputs, made by new, and the
        residual stream."""

    @abstractmethod
    def attend(self, layer: int, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        """(n, tp_q_head_num * v_head_dim). Writes K and V to the pool if begin and advance have
        not. In the batch's attention_out where the backend uses it."""

    @abstractmethod
    def advance(
        self,
        layer: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
        places: TokenPlaces,
        new: NewTensor,
    ) -> AttentionInputs:
        """The rest of a layer and the beginning of the next, whose inputs new makes."""

    @abstractmethod
    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The rest of the last layer for rows int64 (m,) only -> final states (m, hidden_size)."""
