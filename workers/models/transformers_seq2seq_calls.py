"""What stands behind transformers' attention while an encoder-decoder runs: its probe, its encoder,
the projections of cross-attention, and a step. Knows no particular architecture.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from attention import AttentionHeads, ForwardBatch, LayerAttentionConfig, RadixAttention
from attention.cross_layer import CrossAttention
from workers.errors import ModelLoadError
from workers.models.transformers_attention import AttentionProbe, LayerCall
from workers.models.transformers_states import SlotCache


class SeenEncoder(EncoderDecoderCache):
    """A cache in which cross-attention finds that its keys are known, so that it projects none, and
    in which nothing is kept: RadixAttention keeps the decoder's, the pool has the encoder's."""

    def __init__(self, config: PreTrainedConfig, num_layers: int) -> None:
        known = DynamicCache()
        nothing = torch.zeros(1, 1, 1, 1)
        for layer_idx in range(num_layers):
            known.update(nothing, nothing, layer_idx)
        super().__init__(SlotCache(config), known)


class Seq2SeqProbe:
    """Records the calls of a pass of two equal tokens, the first of which is at the same position
    as the second, and refuses what cannot be served.

    calls: by module, in the order of the pass.
    """

    def __init__(self, cross_modules: Set[nn.Module], max_encoder_tokens: int) -> None:
        self.calls: dict[nn.Module, LayerCall] = {}
        self._cross_modules = cross_modules
        self._max_encoder_tokens = max_encoder_tokens
        self._own = AttentionProbe()

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        if module in self.calls:
            raise ModelLoadError(f"{type(module).__name__} attends twice in a pass")
        if module not in self._cross_modules:
            out = self._own.attend(module, q, k, v, options)
            self.calls[module] = list(self._own.calls.values())[-1]
            return out
        _check_sees_all(module, options)
        heads = AttentionHeads(q.shape[1], q.shape[1], q.shape[2], q.shape[2])
        config = LayerAttentionConfig(max_encoder_tokens=self._max_encoder_tokens)
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        self.calls[module] = LayerCall(heads, scaling, config, None)
        return torch.zeros_like(q)


class EncoderPass:
    """Every token sees every other one; nothing is cached."""

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        _check_sees_all(module, options)
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=options.get("scaling"))
        return out.squeeze(0).transpose(0, 1)


class TakenKV:
    """The keys and values that a call of cross-attention brings; nothing is attended to."""

    def __init__(self) -> None:
        self.kv = torch.empty(0), torch.empty(0)

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        self.kv = k, v
        return torch.zeros_like(q)


class DecoderStep:
    """One step: every call attends through its own layer over the step's batch."""

    def __init__(self, layers: Mapping[nn.Module, nn.Module], forward_batch: ForwardBatch) -> None:
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
        layer = self._layers[module]
        if isinstance(layer, CrossAttention):
            out = layer(q.reshape(q.shape[0], -1), self._forward_batch)
        else:
            out = layer(q, k, v, self._forward_batch)
        attended: torch.Tensor = out.view(q.shape)
        return attended


def layer_of(call: LayerCall, layer_id: int) -> RadixAttention | CrossAttention:
    """What serves a call, as one layer of KV memory."""
    heads = call.heads
    if not call.config.max_encoder_tokens:
        return call.radix_attention(layer_id)
    return CrossAttention(
        heads.tp_q_head_num, heads.head_dim, call.scaling, heads.tp_k_head_num, layer_id
    )


def _check_sees_all(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Masks and biases would hide tokens of the encoder or weigh them."""
    asked = {"attention_mask", "sliding_window", "softcap", "s_aux", "position_bias"}
    given = sorted(name for name in asked if options.get(name) is not None)
    if given or getattr(module, "is_causal", False) or options.get("is_causal"):
        what = ", ".join(given) or "a causal mask"
        raise ModelLoadError(f"{type(module).__name__} asks attention over an encoder for {what}")
