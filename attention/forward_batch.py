"""One step's batch as the layers see it: flat token tensors and ragged row lengths.

Knows no request objects and no sampling. Built once per step by the model runner; every tensor
lives on the runner's device, every `*_cpu` twin is a host copy, so that nothing below needs to
wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.qkv_projection import QKVProjection
from attention.visibility import CAUSAL, Items, Visibility


class ForwardMode(Enum):
    """What the rows of a batch are.

    EXTEND: every row brings one or more new tokens on top of a cached prefix of any length; rows
    that decode may be mixed in, they are rows of length one. DECODE: every row brings exactly one.
    TARGET_VERIFY and DRAFT_EXTEND belong to speculative decoding. IDLE: no row at all.
    """

    EXTEND = auto()
    DECODE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    IDLE = auto()

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


RAGGED = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's launches depend on beside their numbers: the key of a captured graph.

    rows: as many as there are, or as a graph has room for. tokens_per_row: new tokens of every row,
    RAGGED where they differ.
    """

    mode: ForwardMode
    rows: int
    tokens_per_row: int


class AttentionLayer(Protocol):
    """What a backend reads of the layer that calls it; RadixAttention is the one there is."""

    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    layer_id: int
    logit_cap: float
    sliding_window_size: int
    chunk_size: int
    sinks: torch.Tensor | None


class AttentionDispatch(Protocol):
    """What a layer calls: an AttentionBackend, or a wrapper around one that measures it."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor: ...

    def fuses_decode_projection(self, num_rows: int) -> bool:
        """Whether a decode step of that many rows should hand over unrotated projections."""
        ...

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor: ...

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor: ...

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class ForwardBatch:
    """bs rows, num_tokens new tokens in all, laid out row after row.

    Invariant for row i: seq_lens[i] == extend_prefix_lens[i] + extend_seq_lens[i], and
    the pool's req_to_token[req_pool_indices[i], :seq_lens[i]] holds the cache index of every
    token of the row, the new ones included.

    attention_out: (num_tokens, tp_q_head_num * v_head_dim) of the model's dtype, where a layer's
    attention should leave its output. A backend may return a tensor of its own instead.
    bounded_cache_locs: out_cache_loc of each account beside account 0.
    is_captured: a graph is made of the step. What the host knows of its rows is then of no replay.
    encoder_lens_cpu: int32 (bs,), what each row's encoder made, at least one token, in the table of
    AttentionConfig.encoder_account; empty where the model has no encoder.
    visibility: which keys of its row a new token sees, but for layers that see an encoder's.
    """

    forward_mode: ForwardMode
    batch_size: int
    num_tokens: int
    input_ids: torch.Tensor  # int64 (num_tokens,)
    positions: torch.Tensor  # int64 (num_tokens,)
    req_pool_indices: torch.Tensor  # int64 (bs,)
    seq_lens: torch.Tensor  # int32 (bs,), cached prefix plus new tokens
    extend_seq_lens: torch.Tensor  # int32 (bs,), new tokens; all ones in DECODE
    extend_prefix_lens: torch.Tensor  # int32 (bs,)
    out_cache_loc: torch.Tensor  # int64 (num_tokens,), where the new tokens' K and V go
    seq_lens_cpu: npt.NDArray[np.int32]
    extend_seq_lens_cpu: npt.NDArray[np.int32]
    extend_prefix_lens_cpu: npt.NDArray[np.int32]
    attn_backend: AttentionDispatch
    attention_out: torch.Tensor | None = None
    bounded_cache_locs: tuple[torch.Tensor, ...] = ()
    is_captured: bool = False
    encoder_lens_cpu: npt.NDArray[np.int32] = field(
        default_factory=lambda: np.zeros(0, dtype=np.int32)
    )
    visibility: Visibility = CAUSAL

    @property
    def locs_by_account(self) -> tuple[torch.Tensor, ...]:
        return (self.out_cache_loc, *self.bounded_cache_locs)

    def decode_rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows whose only new token sees all that they have, longest first, and the rows with other
        new tokens. Rows that pad a batch are neither."""
        num_new, seq_lens = self.extend_seq_lens_cpu, self.seq_lens_cpu
        # A token of an item does not see all that comes before it.
        sees_all = not isinstance(self.visibility, Items)
        has_keys = seq_lens > 0
        decode = np.flatnonzero((num_new == 1) & has_keys & sees_all)
        longer = np.flatnonzero((num_new > 1 if sees_all else num_new > 0) & has_keys)
        return decode[np.argsort(-seq_lens[decode], kind="stable")], longer

    def cache_locs(self, account: int) -> torch.Tensor:
        """Where the new tokens' K and V go in the account, int64 (num_tokens,)."""
        return self.out_cache_loc if account == 0 else self.bounded_cache_locs[account - 1]
