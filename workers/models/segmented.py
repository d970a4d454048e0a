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
    """Of each new token. positions: int64 (n,). cache_locs: int64 (n,) of each account of KV
    memory, where its K and V go."""

    positions: torch.Tensor
    cache_locs: tuple[torch.Tensor, ...]


class SegmentedCausalLM(NativeCausalLM):
    """forward_rows in pieces: begin, then for each layer attention_inputs, attend and, but for the
    last, finish; finish_rows. The residual stream (n, hidden_size) is changed in place on the way.
    """

    def unlike_layers(self) -> frozenset[int]:
        """Layers that between them launch every kernel that any layer's finish launches, beside
        those of the first layer and the last but one."""
        return frozenset()

    @abstractmethod
    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 (n,) -> the residual stream and the first layer's normalised input."""

    @abstractmethod
    def attention_inputs(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        """hidden: the layer's normalised input. Made by new."""

    @abstractmethod
    def attend(self, layer: int, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        """(n, tp_q_head_num * v_head_dim). Writes K and V to the pool if attention_inputs has not.
        In the batch's attention_out where the backend uses it."""

    @abstractmethod
    def finish(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of a layer -> the next one's normalised input (n, hidden_size)."""

    @abstractmethod
    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The rest of the last layer for rows int64 (m,) only -> final states (m, hidden_size)."""
