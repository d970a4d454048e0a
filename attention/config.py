"""The geometry of a model's attention on one rank. Knows no weights, no pools, no requests."""

from dataclasses import dataclass

import torch

MIN_PAGE_SIZE = 1
MAX_PAGE_SIZE = 256


@dataclass(frozen=True, slots=True)
class LayerAttentionConfig:
    """What differs between the attention layers of one model.

    sliding_window_size: number of most recent keys a query sees, itself included; -1 means all.
    logit_cap: c > 0 replaces a score s by c * tanh(s / c) before the softmax; 0 disables it.
    has_sinks: whether the layer adds one learned logit per head to the softmax denominator.
    """

    sliding_window_size: int = -1
    logit_cap: float = 0.0
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Geometry shared by the backend, the pools and the layers of one rank.

    tp_q_head_num, tp_k_head_num: query and KV heads of this rank (KV heads are replicated when
    a model has fewer of them than there are ranks, so tp_k_head_num >= 1).
    head_dim, v_head_dim: elements per head. max_context_len: tokens per request, prompt and output.
    dtype: of q and of the attention output. kv_dtype: of the pool.
    """

    num_layers: int
    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    max_context_len: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerAttentionConfig, ...]

    def __post_init__(self) -> None:
        if not MIN_PAGE_SIZE <= self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(
                f"page_size must lie in {MIN_PAGE_SIZE}..{MAX_PAGE_SIZE}, got {self.page_size}"
            )
        if self.tp_q_head_num % self.tp_k_head_num:
            raise ValueError(
                f"tp_q_head_num={self.tp_q_head_num} is not a multiple of "
                f"tp_k_head_num={self.tp_k_head_num}"
            )
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layer configs for num_layers={self.num_layers}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token occupies in the pool over all layers of this rank."""
        elements = self.tp_k_head_num * (self.head_dim + self.v_head_dim)
        return self.num_layers * elements * self.kv_dtype.itemsize
