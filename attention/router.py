"""Several backends over one pool as if they were one: by phase of the step and by layer.

Each plans the steps in which some layer of its own attends. Knows no kernel. A model with one route
has its backend itself and none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from attention.registry import create_attention_backend
from attention.routes import AttentionRoutes
from attention.visibility import VisibilityKind


def build_attention(
    routes: AttentionRoutes,
    config: AttentionConfig,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: TokenToKVPool,
) -> AttentionBackend:
    """The backend of the routes, or a router over theirs. AttentionBackendError as of
    create_attention_backend."""
    pools = (req_to_token_pool, token_to_kv_pool)
    backends = {name: create_attention_backend(name, config, *pools) for name in routes.names}
    if len(backends) == 1:
        return backends[routes.names[0]]
    is_graphable = all(isinstance(backends[name], GraphAttentionBackend) for name in routes.decode)
    router: type[AttentionRouter] = GraphAttentionRouter if is_graphable else AttentionRouter
    if is_graphable and routes.trees and all(_captures_trees(backends[n]) for n in routes.trees):
        router = GraphTreeRouter
    return router(config, *pools, routes, backends)


class AttentionRouter(AttentionBackend):
    """Passes every call on to the backend of the step's phase and the call's layer.

    backends: those that the routes name, over the same pools.
    """

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        routes: AttentionRoutes,
        backends: Mapping[str, AttentionBackend],
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        if {len(routes.extend), len(routes.decode)} != {config.num_layers}:
            raise ValueError(f"routes of {len(routes.decode)} layers for {config.num_layers}")
        self._extend = tuple(backends[name] for name in routes.extend)
        self._decode = tuple(backends[name] for name in routes.decode)
        self._trees = tuple(backends[name] for name in routes.trees) or self._extend
        self.capability = replace(self._decode[0].capability, name=str(routes))
        self._names = tuple(map(routes.name_in, (ForwardMode.EXTEND, ForwardMode.DECODE)))

    @classmethod
    def probe(cls) -> BackendProbe:
        """Those it passes calls on to have been probed."""
        return BackendProbe(is_available=True)

    def name_in(self, mode: ForwardMode) -> str:
        return self._names[mode.is_decode]

    def name_of(self, forward_batch: ForwardBatch) -> str:
        if forward_batch.visibility.kind is VisibilityKind.TREE:
            return "+".join(one.capability.name for one in _each_once(self._trees))
        return super().name_of(forward_batch)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in _each_once(self._of(forward_batch)):
            backend.init_forward_metadata(forward_batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        backend = self._of(forward_batch)[layer.layer_id]
        return backend.forward(q, k, v, layer, forward_batch, save_kv_cache)

    def fuses_decode_projection(self, num_rows: int) -> bool:
        """A step asks once for all of its layers."""
        return all(backend.fuses_decode_projection(num_rows) for backend in self._decode)

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._decode[layer.layer_id].forward_projected(projection, layer, forward_batch)

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        backend = self._of(forward_batch)[layer.layer_id]
        return backend.forward_latent(tokens, up, layer, forward_batch)

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._of(forward_batch)[layer.layer_id].forward_cross(q, layer, forward_batch)

    def _of(self, forward_batch: ForwardBatch) -> tuple[AttentionBackend, ...]:
        """By layer."""
        if forward_batch.forward_mode.is_decode:
            return self._decode
        is_tree = forward_batch.visibility.kind is VisibilityKind.TREE
        return self._trees if is_tree else self._extend


class GraphAttentionRouter(AttentionRouter, GraphAttentionBackend):
    """Where every backend of decode steps can be captured, so can the step."""

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        routes: AttentionRoutes,
        backends: Mapping[str, AttentionBackend],
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool, routes, backends)
        self._graphed = tuple(map(graphable, _each_once(self._decode)))

    def init_cuda_graph_state(self, max_bs: int) -> None:
        for backend in self._graphed:
            backend.init_cuda_graph_state(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self._graphed:
            backend.init_forward_metadata_capture_cuda_graph(forward_batch)

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        for backend in self._graphed:
            backend.record_step_tables(forward_batch)

    @property
    def plans_on_host(self) -> bool:
        return any(backend.plans_on_host for backend in self._graphed)

    def before_replay(self, num_rows: int, seq_lens_cpu: npt.NDArray[np.int32]) -> None:
        for backend in self._graphed:
            backend.before_replay(num_rows, seq_lens_cpu)


class GraphTreeRouter(GraphAttentionRouter):
    """Where those can be captured, too, that attend in steps with trees: of steps that verify
    drafts, these alone are."""

    captures_verify: ClassVar[bool] = True

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        routes: AttentionRoutes,
        backends: Mapping[str, AttentionBackend],
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool, routes, backends)
        self._all_graphed = tuple(map(graphable, _each_once((*self._decode, *self._trees))))

    def init_cuda_graph_state(self, max_bs: int) -> None:
        for backend in self._all_graphed:
            backend.init_cuda_graph_state(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self._graphed_of(forward_batch):
            backend.init_forward_metadata_capture_cuda_graph(forward_batch)

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        for backend in self._graphed_of(forward_batch):
            backend.record_step_tables(forward_batch)

    def _graphed_of(self, forward_batch: ForwardBatch) -> tuple[GraphAttentionBackend, ...]:
        """Raises AttentionBackendError for steps that cannot be captured."""
        return tuple(map(graphable, _each_once(self._of(forward_batch))))


def _captures_trees(backend: AttentionBackend) -> bool:
    if not isinstance(backend, GraphAttentionBackend):
        return False
    return backend.captures_verify and not backend.plans_on_host


def _each_once(backends: tuple[AttentionBackend, ...]) -> tuple[AttentionBackend, ...]:
    return tuple({id(backend): backend for backend in backends}.values())


def graphable(backend: AttentionBackend) -> GraphAttentionBackend:
    """Raises AttentionBackendError where it is not."""
    if not isinstance(backend, GraphAttentionBackend):
        raise AttentionBackendError(f"{backend.capability.name} cannot be captured")
    return backend
