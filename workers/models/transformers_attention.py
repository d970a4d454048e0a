"""The bridge from transformers' attention interface to RadixAttention.

A model of transformers calls one registered function for every attention layer and passes its
keyword arguments down to it. The function here is stateless: what it needs for a step comes with
the call, as CALL_ARGUMENT, or lies in the module that calls. Knows no weights and no particular
architecture.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from attention import AttentionHeads, ForwardBatch, LayerAttentionConfig, RadixAttention
from workers.errors import ModelLoadError
from workers.layers.temperature import PositionTemperature
from workers.models.base import AttentionGeometry

ATTENTION_NAME = "tessera"
OWN_ATTENTION_NAME = "eager"
CALL_ARGUMENT = "tessera_attention"
# Arguments that carry nothing attention would have to honour in a flat batch without padding.
_INERT_OPTIONS = frozenset(
    ("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict")
    + ("output_hidden_states", "output_router_logits", "logits_to_keep", "position_embeddings")
)

# What modules that stand in several layers call theirs.
SHARED_LAYER = -1
# Of a model that keeps states alone: requests are counted in pages still, so a token has an entry,
# which nobody writes, as small as every backend takes.
NO_ATTENTION = AttentionGeometry(1, 1, 8, 8, (LayerAttentionConfig(),))


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


class CallInPlace:
    """The call of the pass that is running, for modules that get none of their model's keyword
    arguments. Such a module has it as its attribute CALL_ARGUMENT."""

    def __init__(self) -> None:
        self.call: AttentionCall | None = None

    def put_into(self, body: nn.Module) -> None:
        for module in body.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, CALL_ARGUMENT, self)

    @contextmanager
    def during(self, call: AttentionCall) -> Iterator[None]:
        """One pass of the body."""
        self.call = call
        try:
            yield
        finally:
            self.call = None


def _interface_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: query, key, value (1, heads, n, dim) -> (1, n, heads, dim)."""
    in_place: CallInPlace = getattr(module, CALL_ARGUMENT, CallInPlace())
    call: AttentionCall | None = options.pop(CALL_ARGUMENT, in_place.call)
    if call is None:
        raise ModelLoadError(f"{type(module).__name__} does not get its model's keyword arguments")
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    options["attention_mask"] = attention_mask
    return call.attend(module, q, k, v, options).unsqueeze(0), None


def register_attention_interface() -> None:
    """Make the bridge selectable as attn_implementation. Registering again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _interface_function)


class CallKey(NamedTuple):
    """A call of attention within a pass: the turn-th, from 0, that names this layer_idx."""

    layer_idx: int
    turn: int


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call, as the probe saw it. What it caches is a layer of the pool of its own."""

    heads: AttentionHeads
    scaling: float
    config: LayerAttentionConfig
    sinks: torch.Tensor | None

    def radix_attention(self, layer_id: int) -> RadixAttention:
        layer = RadixAttention(
            self.heads.tp_q_head_num,
            self.heads.head_dim,
            self.scaling,
            self.heads.tp_k_head_num,
            layer_id,
            v_head_dim=self.heads.v_head_dim,
            logit_cap=self.config.logit_cap,
            sliding_window_size=self.config.sliding_window_size,
        )
        layer.chunk_size = self.config.chunk_size
        layer.stores_kv = self.config.kv_layer_id is None
        layer.sinks = None if self.sinks is None else self.sinks.detach()
        return layer


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by rounding at most."""
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= 0.01 * one.norm())


def _layer_idx_of(module: nn.Module) -> int:
    """The layer that the module says it is in, SHARED_LAYER where it stands in several (Zamba)."""
    layer_idx = module.layer_idx
    return layer_idx if isinstance(layer_idx, int) else SHARED_LAYER


class AttentionProbe:
    """Records what every call asks of attention, and refuses what RadixAttention does not do.

    For a batch of one token at one position, twice: where attention adds nothing, what comes of a
    token is a function of itself and its position, or its model cannot run as a flat batch.
    A call that brings the very K and V of an earlier one, not copies, reads that one's cache.

    calls: in the order in which a pass makes them.
    """

    def __init__(self) -> None:
        self.calls: dict[CallKey, LayerCall] = {}
        self._turns: Counter[int] = Counter()
        # Kept alive: only then is an address that comes again the same tensor.
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        name = type(module).__name__
        if not hasattr(module, "layer_idx"):
            raise ModelLoadError(f"{name} has no layer_idx: its KV cache has no place")
        layer_id = _layer_idx_of(module)
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise ModelLoadError(f"{name} is not causal")
        semantic = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
        given = {key for key, value in options.items() if value is not None}
        unknown = given - semantic - _INERT_OPTIONS
        if unknown:
            raise ModelLoadError(f"{name} asks attention for {', '.join(sorted(unknown))}")
        self._check_tokens(name, q, k, v)
        sinks, call_id = options.get("s_aux"), len(self.calls)
        source = self._layer_that_stored(k, v)
        if source is None:
            self._stored[call_id] = k, v
        config = LayerAttentionConfig(
            sliding_window_size=options.get("sliding_window") or -1,
            logit_cap=options.get("softcap") or 0.0,
            has_sinks=sinks is not None,
            kv_layer_id=source,
        )
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        heads = AttentionHeads(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        key = CallKey(layer_id, self._turns[layer_id])
        self._turns[layer_id] += 1
        self.calls[key] = LayerCall(heads, scaling, config, sinks)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def _check_tokens(self, name: str, *brought: torch.Tensor) -> None:
        """brought: of two tokens alike at one position, each (2, heads, dim)."""
        if not all(alike(rows[0], rows[-1]) for rows in brought):
            raise ModelLoadError(f"{name} has tokens depend on each other beside attention")

    def _layer_that_stored(self, k: torch.Tensor, v: torch.Tensor) -> int | None:
        for call_id, stored in self._stored.items():
            pairs = zip((k, v), stored, strict=True)
            if all(
                new.data_ptr() == old.data_ptr() and new.shape == old.shape for new, old in pairs
            ):
                return call_id
        return None


class NoAttention:
    """Where attention itself is not the question: it adds nothing."""

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


class PagedAttentionCall:
    """One step: every call attends through its RadixAttention over the step's batch."""

    def __init__(
        self,
        layers: Mapping[CallKey, nn.Module],
        temperatures: Mapping[nn.Module, PositionTemperature],
        forward_batch: ForwardBatch,
    ) -> None:
        self._layers = layers
        self._temperatures = temperatures
        self._turns: Counter[int] = Counter()
        self._forward_batch = forward_batch

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        layer_id = _layer_idx_of(module)
        layer = self._layers[CallKey(layer_id, self._turns[layer_id])]
        self._turns[layer_id] += 1
        temperature = self._temperatures.get(module)
        if temperature is not None:
            q = temperature.scaled(q, self._forward_batch.positions)
        out: torch.Tensor = layer(q, k, v, self._forward_batch)
        return out.view(q.shape[0], q.shape[1], v.shape[2])


def geometry_of(calls: Sequence[LayerCall]) -> AttentionGeometry:
    """The heads that most calls have, and those of each call that has others."""
    if not calls:
        return NO_ATTENTION
    ((heads, _),) = Counter(call.heads for call in calls).most_common(1)
    layers = (
        replace(call.config, heads=None if call.heads == heads else call.heads) for call in calls
    )
    return AttentionGeometry(
        heads.tp_q_head_num,
        heads.tp_k_head_num,
        heads.head_dim,
        heads.v_head_dim,
        tuple(layers),
    )
