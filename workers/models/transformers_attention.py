"""The bridge from transformers' attention interface to RadixAttention.

A model of transformers calls one registered function for every attention layer and passes its
keyword arguments down to it. The function here is stateless: what it needs for a step comes with
the call, as CALL_ARGUMENT. Knows no weights and no particular architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from attention import ForwardBatch, LayerAttentionConfig, RadixAttention
from workers.errors import ModelLoadError
from workers.models.base import AttentionGeometry

ATTENTION_NAME = "tessera"
CALL_ARGUMENT = "tessera_attention"
# Arguments that carry nothing attention would have to honour in a flat batch without padding.
_INERT_OPTIONS = frozenset(
    ("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict")
    + ("output_hidden_states", "output_router_logits", "logits_to_keep", "position_embeddings")
)


class AttentionCall(Protocol):
    """What stands behind the registered function during one forward pass."""

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """q (n, q_heads, head_dim), k (n, kv_heads, head_dim), v (n, kv_heads, v_head_dim)
        -> (n, q_heads, v_head_dim)."""


def _interface_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: query, key, value (1, heads, n, dim) -> (1, n, heads, dim)."""
    call: AttentionCall | None = options.pop(CALL_ARGUMENT, None)
    if call is None:
        raise ModelLoadError(f"{type(module).__name__} does not get its model's keyword arguments")
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    options["attention_mask"] = attention_mask
    return call.attend(module, q, k, v, options).unsqueeze(0), None


def register_attention_interface() -> None:
    """Make the bridge selectable as attn_implementation. Registering again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _interface_function)


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """One layer's call, as the probe saw it."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    config: LayerAttentionConfig
    sinks: torch.Tensor | None

    def radix_attention(self, layer_id: int) -> RadixAttention:
        layer = RadixAttention(
            self.num_q_heads,
            self.head_dim,
            self.scaling,
            self.num_kv_heads,
            layer_id,
            v_head_dim=self.v_head_dim,
            logit_cap=self.config.logit_cap,
            sliding_window_size=self.config.sliding_window_size,
        )
        layer.sinks = None if self.sinks is None else self.sinks.detach()
        return layer


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by rounding at most."""
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= 0.01 * one.norm())


class AttentionProbe:
    """Records what every layer asks of attention, and refuses what RadixAttention does not do.

    For a batch of one token at one position, twice: where attention adds nothing, what comes of a
    token is a function of itself and its position, or its model cannot run as a flat batch.
    """

    def __init__(self) -> None:
        self.calls: dict[int, _LayerCall] = {}

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        name = type(module).__name__
        layer_id = getattr(module, "layer_idx", None)
        if not isinstance(layer_id, int):
            raise ModelLoadError(f"{name} has no layer_idx: its KV cache has no place")
        if layer_id in self.calls:
            raise ModelLoadError(f"{name} attends more than once in layer {layer_id}")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise ModelLoadError(f"{name} is not causal")
        semantic = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
        given = {key for key, value in options.items() if value is not None}
        unknown = given - semantic - _INERT_OPTIONS
        if unknown:
            raise ModelLoadError(f"{name} asks attention for {', '.join(sorted(unknown))}")
        if not all(alike(rows[0], rows[-1]) for rows in (q, k, v)):
            raise ModelLoadError(f"{name} has tokens depend on each other beside attention")
        sinks = options.get("s_aux")
        config = LayerAttentionConfig(
            sliding_window_size=options.get("sliding_window") or -1,
            logit_cap=options.get("softcap") or 0.0,
            has_sinks=sinks is not None,
        )
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        self.calls[layer_id] = _LayerCall(
            q.shape[1], k.shape[1], q.shape[2], v.shape[2], scaling, config, sinks
        )
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def layers(self, num_layers: int) -> list[_LayerCall]:
        """The calls in layer order. Raises ModelLoadError unless each layer made exactly one."""
        if sorted(self.calls) != list(range(num_layers)):
            raise ModelLoadError(
                f"{len(self.calls)} of {num_layers} layers attend through transformers' attention "
                "interface; the others (recurrent or convolutional) cannot be served"
            )
        return [self.calls[layer_id] for layer_id in range(num_layers)]


class PagedAttentionCall:
    """One step: every layer attends through its RadixAttention over the step's batch."""

    def __init__(self, layers: nn.ModuleList, forward_batch: ForwardBatch) -> None:
        self._layers = layers
        self._forward_batch = forward_batch

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        layer_id: int = module.layer_idx  # type: ignore[assignment]
        out: torch.Tensor = self._layers[layer_id](q, k, v, self._forward_batch)
        return out.view(q.shape[0], q.shape[1], v.shape[2])


def geometry_of(calls: list[_LayerCall]) -> AttentionGeometry:
    """The geometry all layers share. Raises ModelLoadError when they differ in more than kind."""
    shapes = {(c.num_q_heads, c.num_kv_heads, c.head_dim, c.v_head_dim) for c in calls}
    if len(shapes) != 1:
        raise ModelLoadError(
            "layers differ in (query heads, KV heads, head_dim, v_head_dim): "
            + ", ".join(str(shape) for shape in sorted(shapes))
        )
    ((num_q_heads, num_kv_heads, head_dim, v_head_dim),) = shapes
    return AttentionGeometry(
        num_q_heads, num_kv_heads, head_dim, v_head_dim, tuple(c.config for c in calls)
    )
