"""The layers whose attention is measured: those of the model, with random queries, keys and values.

One class for models that keep K and V of heads, one for those that keep latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.latent_inputs import LatentTokens, UpProjections
from attention.latent_layer import LatentAttention
from attention.layer import RadixAttention
from attention.memory.layout import LatentEntry
from attention.qkv_projection import QKVProjection, Rotation

Run = Callable[[], object]


class MeasuredLayers(Protocol):
    def run(self, backend: AttentionBackend, batch: ForwardBatch) -> Run:
        """What calls the backend for every layer of the step, whose metadata it has or records."""


class DecodeFront(Protocol):
    """What a model launches in decode steps of backends that do not rotate."""

    def attend(
        self, projection: QKVProjection, layer: RadixAttention, batch: ForwardBatch
    ) -> object:
        """Rotate, write K and V to the layer's pages, attend by the batch's backend."""


class HeadLayers:
    """Of a model with K and V of heads. front: None where the model hands over q, k and v."""

    def __init__(self, config: AttentionConfig, front: DecodeFront | None = None) -> None:
        self._config = config
        self._front = front
        self._layers = [_layer(config, layer_id) for layer_id in range(config.num_layers)]
        self._cos_sin = _random((config.max_context_len, config.head_dim), config, torch.float32)

    def run(self, backend: AttentionBackend, batch: ForwardBatch) -> Run:
        batch = replace(batch, attn_backend=backend)
        if self._front is not None and batch.forward_mode.is_decode:
            return self._run_projected(backend, batch, self._front)
        inputs = {heads: self._inputs(heads, batch.num_tokens) for heads in self._heads()}

        def run() -> None:
            for layer in self._layers:
                q, k, v = inputs[_heads_of(layer)]
                layer(q, k, v, batch)

        return run

    def _run_projected(
        self, backend: AttentionBackend, batch: ForwardBatch, front: DecodeFront
    ) -> Run:
        config = self._config
        width = (config.tp_q_head_num + 2 * config.tp_k_head_num) * config.head_dim
        projection = QKVProjection(
            _random((1, batch.batch_size, width), config, config.dtype),
            Rotation(self._cos_sin, None, None),
            config.dtype,
        )
        fuses = backend.fuses_decode_projection(batch.batch_size)

        def attend(layer: RadixAttention) -> None:
            if fuses:
                layer.forward_projected(projection, batch)
            else:
                front.attend(projection, layer, batch)

        def run() -> None:
            # Ends the step's tables before the first layer, as the embedding lookup does.
            projection.partials.mul_(1.0)
            for layer in self._layers:
                attend(layer)

        return run

    def _heads(self) -> set[tuple[int, int, int, int]]:
        return {_heads_of(layer) for layer in self._layers}

    def _inputs(
        self, heads: tuple[int, int, int, int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_heads, k_heads, head_dim, v_head_dim = heads
        shapes = (q_heads * head_dim, k_heads * head_dim, k_heads * v_head_dim)
        q, k, v = (_random((num_tokens, n), self._config, self._config.dtype) for n in shapes)
        return q, k, v


class LatentLayers:
    """Of a model with multi-head latent attention."""

    def __init__(self, config: AttentionConfig, entry: LatentEntry) -> None:
        self._config, self._entry = config, entry
        self._nope_dim = config.head_dim - entry.rope_dim
        scaling = config.head_dim**-0.5
        self._layers = [
            LatentAttention(config.tp_q_head_num, config.v_head_dim, entry, scaling, layer_id)
            for layer_id in range(config.num_layers)
        ]
        rows = self._nope_dim + config.v_head_dim
        joined = self._noise(config.tp_q_head_num, rows, entry.latent_dim)
        joined *= entry.latent_dim**-0.5
        self._up = UpProjections(joined[:, : self._nope_dim], joined[:, self._nope_dim :])

    def run(self, backend: AttentionBackend, batch: ForwardBatch) -> Run:
        batch = replace(batch, attn_backend=backend)
        n, heads, entry = batch.num_tokens, self._config.tp_q_head_num, self._entry
        tokens = LatentTokens(
            q_nope=self._noise(n, heads, self._nope_dim),
            q_rope=self._noise(n, heads, entry.rope_dim),
            latent=self._noise(n, entry.latent_dim),
            k_rope=self._noise(n, entry.rope_dim),
        )

        def run() -> None:
            for layer in self._layers:
                layer(tokens, self._up, batch)

        return run

    def _noise(self, *shape: int) -> torch.Tensor:
        return _random(shape, self._config, self._config.dtype)


def measured_layers(config: AttentionConfig, front: DecodeFront | None) -> MeasuredLayers:
    if config.latent is not None:
        return LatentLayers(config, config.latent)
    return HeadLayers(config, front)


def _layer(config: AttentionConfig, layer_id: int) -> RadixAttention:
    own, heads = config.layers[layer_id], config.heads_of(layer_id)
    layer = RadixAttention(
        heads.tp_q_head_num,
        heads.head_dim,
        heads.head_dim**-0.5,
        heads.tp_k_head_num,
        layer_id,
        v_head_dim=heads.v_head_dim,
        logit_cap=own.logit_cap,
        sliding_window_size=own.sliding_window_size,
    )
    layer.chunk_size = own.chunk_size
    layer.stores_kv = own.kv_layer_id is None
    if own.has_sinks:
        layer.sinks = _random((heads.tp_q_head_num,), config, torch.float32)
    return layer


def _heads_of(layer: RadixAttention) -> tuple[int, int, int, int]:
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim


def _random(shape: tuple[int, ...], config: AttentionConfig, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=config.device).to(dtype)
