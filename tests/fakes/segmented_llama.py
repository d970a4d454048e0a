"""LlamaForCausalLM cut at its attention, on any device: what segment graphs are tested with.

As the fused model does, it writes K and V before attention, those of padding included.
"""

import torch

from workers.models.llama import LlamaForCausalLM
from workers.models.segmented import SegmentedCausalLM


class SegmentedLlama(LlamaForCausalLM, SegmentedCausalLM):
    """pool: set by who makes a LlamaForCausalLM one of this class."""

    def attention_inputs(self, layer, hidden, places, new):
        attention = self.model.decoder_layers[layer].self_attn
        q, k, v = attention.inputs(places.positions, hidden)
        v = v.unflatten(-1, (-1, attention.head_dim))
        self.pool.set_kv_buffer(layer, places.cache_locs[self.pool.account_of(layer)], k, v)
        return tuple(_kept(x, new) for x in (q, k, v))

    def attend(self, layer, inputs, batch):
        attention = self.model.decoder_layers[layer].self_attn.attn
        return attention(*inputs, batch, save_kv_cache=False)


def _kept(tensor: torch.Tensor, new) -> torch.Tensor:
    return new(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
