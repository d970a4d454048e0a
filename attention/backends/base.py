"""The contract of an attention backend: plan once per step, run once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from attention.visibility import VisibilityKind


class AttentionBackend(ABC):
    """Attention kernels over one rank's pools.

    init_forward_metadata runs once per step and derives everything the layers share (lengths, page
    tables, maxima from host copies); forward runs once per layer and only launches kernels.
    A backend never sees the model runner, a request or a scheduler. Its module imports without
    its kernel package; probe says whether the package is there. capability: of its class, and of an
    instance where that is made of others.
    """

    capability: BackendCapability

    @classmethod
    @abstractmethod
    def probe(cls) -> BackendProbe:
        """Whether the backend's kernels load here, and if not, which package is missing."""

    @classmethod
    def compiles_first(cls, config: AttentionConfig) -> str:
        """What this machine lacks that takes minutes to compile when a backend of config is built;
        "" for nothing. Of a backend whose kernels load."""
        return ""

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        self.config = config
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool

    def name_in(self, mode: ForwardMode) -> str:
        """Of what attends in such a step."""
        return self.capability.name

    def name_of(self, forward_batch: ForwardBatch) -> str:
        """Of what attends in the step, as far as backends take turns."""
        return self.name_in(forward_batch.forward_mode)

    def check_visibility(self, forward_batch: ForwardBatch) -> None:
        """Raises AttentionBackendError where the step's tokens see what the backend has no way to:
        called before a step is planned."""
        kind = forward_batch.visibility.kind
        if kind not in self.capability.visibilities:
            raise AttentionBackendError(f"{self.capability.name} has no {kind}; torch_native has")
        if kind is VisibilityKind.ITEMS and self.config.bounded_retentions:
            # Tokens of an item stand before their places, by which accounts let go of tokens.
            kept = ", ".join(retention.name for retention in self.config.bounded_retentions)
            raise AttentionBackendError(f"accounts that let go of the prefix have no items: {kept}")

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Derive the step's shared metadata. No device-to-host copy happens here."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """q (num_tokens, tp_q_head_num, head_dim), k (num_tokens, tp_k_head_num, head_dim),
        v (num_tokens, tp_k_head_num, v_head_dim) -> (num_tokens, tp_q_head_num, v_head_dim).

        The result may lie in forward_batch.attention_out, if there is one.
        """

    def fuses_decode_projection(self, num_rows: int) -> bool:
        """Whether a decode step of that many rows should hand over unrotated projections to
        forward_projected: the backend can, and it pays."""
        return False

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """A decode step from the projection on: finish q, k and v, write k and v to the pool at
        out_cache_loc, attend. Returns (num_tokens, tp_q_head_num, v_head_dim).

        Raises NotImplementedError where the backend cannot.
        """
        raise NotImplementedError(f"{self.capability.name} takes rotated q, k and v only")

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Multi-head latent attention: cache the new tokens' latents at out_cache_loc, attend.

        Returns (num_tokens, tp_q_head_num, v_head_dim) in q_nope's dtype. Raises
        AttentionBackendError where the backend attends over K and V of heads.
        """
        raise AttentionBackendError(f"{self.capability.name} has no multi-head latent attention")

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Every new token attends to all that its row's encoder made; nothing is written.

        q (num_tokens, tp_q_head_num, head_dim) -> (num_tokens, tp_q_head_num, v_head_dim). Raises
        AttentionBackendError where the backend cannot.
        """
        raise AttentionBackendError(f"{self.capability.name} has no cross-attention")


class LatentAttentionBackend(AttentionBackend):
    """A backend over a pool of latents: forward_latent is all that it does."""

    @abstractmethod
    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor: ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Raises AttentionBackendError: there are no heads in the pool."""
        raise AttentionBackendError(f"{self.capability.name} was built for latents, not for heads")


class PhasedAttentionBackend(AttentionBackend):
    """A backend whose decode steps take other kernels than the rest."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Dispatch by mode."""
        if forward_batch.forward_mode.is_decode:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """As forward, for rows of any number of new tokens."""

    @abstractmethod
    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """As forward, for exactly one new token a row: num_tokens == batch_size."""


class GraphAttentionBackend(AttentionBackend):
    """A backend whose decode step can be captured in a CUDA graph and replayed.

    init_cuda_graph_state once; for each batch size, init_forward_metadata_capture_cuda_graph and
    then, inside the capture, record_step_tables followed by the layers. A replay needs nothing of
    most backends: the graph itself reads the step's lengths and pages from the captured batch's
    tensors and the table of slots. Those that plan on the host do so in before_replay.

    captures_verify: so can steps of TARGET_VERIFY whose rows all bring as many new tokens, in the
    same static buffers. Rows that pad such a batch have seq_lens 0, fewer than new tokens.
    """

    captures_verify: ClassVar[bool] = False

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the static buffers that captured kernels read, for up to max_bs rows."""

    @abstractmethod
    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Point the metadata of this batch size at the static buffers. Launches no kernel."""

    @abstractmethod
    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        """Launch what derives a step's shared metadata on the device, for rows of any length up to
        max_context_len. Call it inside the capture, before the first layer; rows that pad the
        batch have seq_lens 0."""

    @property
    def plans_on_host(self) -> bool:
        """Whether a replay needs before_replay: for one graph of a size, whose rows grow by no pass
        of its own."""
        return False

    def before_replay(self, num_rows: int, seq_lens_cpu: npt.NDArray[np.int32]) -> None:
        """The host is about to launch the graph of num_rows rows, on the current stream.

        seq_lens_cpu: int32, of at least num_rows elements, the first of which are the rows' keys,
        the new token's included; 0 for rows that pad the batch. Whoever needs them later copies
        them.
        """

    def graph_backends(self, num_rows: int) -> tuple[GraphAttentionBackend, ...]:
        """Those with graphs of their own for steps of that many rows, the likeliest first."""
        return (self,)

    def graph_backend_of(
        self, num_rows: int, seq_lens: npt.NDArray[np.int32]
    ) -> GraphAttentionBackend:
        """The one of graph_backends(num_rows) whose graph a step of seq_lens (bs,) should replay,
        num_rows counting the rows that pad it."""
        return self
