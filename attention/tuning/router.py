"""Backends over one pool that take turns by what a step is like, as measured.

The choice is made once a step from the host's lengths. Knows no kernel and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from attention.router import build_attention, graphable
from attention.routes import AttentionRoutes
from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED, LayerNames
from attention.tuning.choice import TunedRoutes, rounded_point
from attention.tuning.points import Lengths, StepPoint, decode_point, point_of
from attention.visibility import VisibilityKind

BackendsByPhase = Mapping[AttentionPhase, Mapping[str, AttentionBackend]]


def build_tuned_attention(
    tuned: TunedRoutes,
    config: AttentionConfig,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: TokenToKVPool,
) -> AttentionBackend:
    """Those that are taken for some step, each once. AttentionBackendError as build_attention."""
    built: dict[LayerNames, AttentionBackend] = {}
    backends: dict[AttentionPhase, dict[str, AttentionBackend]] = {}
    pools = (req_to_token_pool, token_to_kv_pool)
    for phase, names in tuned.chosen.items():
        for name in names:
            layers = tuned.candidates.layers[phase][name]
            if layers not in built:
                built[layers] = build_attention(AttentionRoutes(layers, layers), config, *pools)
            backends.setdefault(phase, {})[name] = built[layers]
    decode = backends[AttentionPhase.DECODE].values()
    is_graphable = all(isinstance(backend, GraphAttentionBackend) for backend in decode)
    router = GraphTunedAttention if is_graphable else TunedAttention
    return router(config, *pools, tuned, backends)


class TunedAttention(AttentionBackend):
    """Passes a step's calls on to the backend that is the fastest for such steps.

    backends: by phase and candidate, those of tuned.chosen, over the same pools.
    """

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        tuned: TunedRoutes,
        backends: BackendsByPhase,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._tuned = tuned
        self._backends = backends
        self._choices: dict[StepPoint, str] = {}
        self._active = next(iter(backends[AttentionPhase.DECODE].values()))
        self.capability = replace(self._active.capability, name=str(tuned))

    @classmethod
    def probe(cls) -> BackendProbe:
        """Those it passes calls on to have been probed."""
        return BackendProbe(is_available=True)

    def name_in(self, mode: ForwardMode) -> str:
        """Of all that may attend in such a step: which one does is told by name_of."""
        return self._tuned.name_in(mode)

    def name_of(self, forward_batch: ForwardBatch) -> str:
        return self._of(forward_batch).name_of(forward_batch)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._active = self._of(forward_batch)
        self._active.init_forward_metadata(forward_batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._active.forward(q, k, v, layer, forward_batch, save_kv_cache)

    def fuses_decode_projection(self, num_rows: int) -> bool:
        return self._active.fuses_decode_projection(num_rows)

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._active.forward_projected(projection, layer, forward_batch)

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        return self._active.forward_latent(tokens, up, layer, forward_batch)

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._active.forward_cross(q, layer, forward_batch)

    def _of(self, forward_batch: ForwardBatch) -> AttentionBackend:
        point = point_of(
            forward_batch.forward_mode,
            forward_batch.seq_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
        )
        kind = forward_batch.visibility.kind
        if kind is VisibilityKind.CAUSAL:
            return self._for(point)
        backends = self._of_phase(point.phase)
        able = [name for name, one in backends.items() if kind in one.capability.visibilities]
        if not able:
            raise AttentionBackendError(f"{AUTO_TUNED}: none of {', '.join(backends)} has {kind}")
        return backends[self._tuned.table.choose(point, able).name]

    def _for(self, point: StepPoint) -> AttentionBackend:
        """Steps that differ by little are alike: a choice is made once for all of them."""
        rounded = rounded_point(point)
        if rounded not in self._choices:
            self._choices[rounded] = self._tuned.choose(rounded).name
        return self._of_phase(point.phase)[self._choices[rounded]]

    def _of_phase(self, phase: AttentionPhase) -> Mapping[str, AttentionBackend]:
        return self._backends.get(phase, self._backends[AttentionPhase.EXTEND])


class GraphTunedAttention(TunedAttention, GraphAttentionBackend):
    """Where all that decode can be captured: each in graphs of its own."""

    def init_cuda_graph_state(self, max_bs: int) -> None:
        for backend in self._decoders().values():
            backend.init_cuda_graph_state(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Of the likeliest for so many rows; the others are captured by themselves."""
        active = self.graph_backends(forward_batch.batch_size)[0]
        active.init_forward_metadata_capture_cuda_graph(forward_batch)
        self._active = active

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        self.graph_backends(forward_batch.batch_size)[0].record_step_tables(forward_batch)

    @property
    def plans_on_host(self) -> bool:
        return any(backend.plans_on_host for backend in self._decoders().values())

    def before_replay(self, num_rows: int, seq_lens_cpu: Lengths) -> None:
        """Of the likeliest for so many rows, as its capture."""
        self.graph_backends(num_rows)[0].before_replay(num_rows, seq_lens_cpu)

    def graph_backends(self, num_rows: int) -> tuple[GraphAttentionBackend, ...]:
        decoders = self._decoders()
        return tuple(decoders[name] for name in self._tuned.decoders_of(num_rows))

    def graph_backend_of(self, num_rows: int, seq_lens: Lengths) -> GraphAttentionBackend:
        """By the rows that there are: padding has no keys to attend to."""
        own = decode_point(seq_lens)
        rows = self._tuned.nearest_rows(num_rows, own.rows)
        point = StepPoint(own.phase, rows, own.new_tokens, own.prefix_tokens, own.is_uneven)
        return graphable(self._for(point))

    def _decoders(self) -> dict[str, GraphAttentionBackend]:
        backends = self._backends[AttentionPhase.DECODE]
        return {name: graphable(backend) for name, backend in backends.items()}
